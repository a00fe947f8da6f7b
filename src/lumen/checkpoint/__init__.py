"""What a run is (state) and how it is committed to disk (store)."""

"""Memory and time, told before the run."""

"""The registry (backends as data) and reference/, the plain-torch twins of every faster kernel."""

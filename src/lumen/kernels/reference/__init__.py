"""The plain-torch twins of every faster kernel."""

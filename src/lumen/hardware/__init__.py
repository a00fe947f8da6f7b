"""Chips as data, and the probe that says what this machine is (injectable, so tests can be any machine)."""

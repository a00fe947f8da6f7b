"""Activation checkpointing; later activation, optimizer and parameter offload."""

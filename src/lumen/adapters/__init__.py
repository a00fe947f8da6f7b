"""The LoRA family through PEFT: inject, initialise, save, load, merge arithmetic."""

"""LoRA through PEFT: inject, initialise, save, load, merge arithmetic."""

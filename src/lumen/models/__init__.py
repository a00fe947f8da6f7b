"""Load a model and its tokenizer (HF directory, hub id, GGUF), freeze layers, name layers, enter attention."""

"""Load a model and its tokenizer, freeze it, name its parts."""

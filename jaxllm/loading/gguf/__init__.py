"""Checkpoints in GGUF files: their config, tokenizer and weights under HF's names."""

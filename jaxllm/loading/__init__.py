"""Weights come from a hub repository, a folder of safetensors, a GGUF file, or random numbers."""

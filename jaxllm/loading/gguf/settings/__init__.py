"""Translate the metadata of GGUF files into the keys of HF's config.json, by kind of model."""

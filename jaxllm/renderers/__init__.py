"""vLLM's import paths for rendering conversations."""

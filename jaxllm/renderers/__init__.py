"""vLLM's import paths of what renders conversations."""

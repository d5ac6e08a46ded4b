"""vLLM's import paths for the OpenAI-compatible server."""

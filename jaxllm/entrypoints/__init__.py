"""Import paths of vLLM for its entry points."""

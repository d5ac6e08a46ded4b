"""Import paths of vLLM for the engine."""

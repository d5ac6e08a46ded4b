"""Import paths of vLLM for sampling."""

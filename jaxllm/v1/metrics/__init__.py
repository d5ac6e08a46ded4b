"""Import paths of vLLM for metrics."""

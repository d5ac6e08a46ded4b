"""Import paths of vLLM for what lives elsewhere here, so that programs written for vLLM need not change."""

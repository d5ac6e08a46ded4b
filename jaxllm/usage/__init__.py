"""Import paths of vLLM for usage statistics, of which there are none here."""

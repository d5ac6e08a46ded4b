"""vLLM's import paths for usage statistics, which jaxllm does not collect."""

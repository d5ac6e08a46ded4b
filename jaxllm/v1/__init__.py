"""vLLM's import paths under `v1`, for names that jaxllm keeps elsewhere."""

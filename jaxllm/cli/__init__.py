"""The command `jaxllm`."""

"""`jaxllm check`: find out whether a model fits on hardware that is not present, by compiling it for that hardware."""

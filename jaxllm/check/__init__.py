"""`jaxllm check`: whether a model fits on hardware that is not here, found out by compiling it for that hardware."""

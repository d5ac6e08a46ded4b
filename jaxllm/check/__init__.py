"""`jaxllm check` finds out whether a model fits on hardware that is not here, by compiling it for that hardware."""

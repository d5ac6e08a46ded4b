"""Turn engine arguments, a checkpoint and the devices into an engine's configuration, model and KV cache size."""

"""LoRA adapters, as vLLM's users name them in requests."""

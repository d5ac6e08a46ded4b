"""LoRA adapters: requests for them, their files and weights, and the store of an engine."""

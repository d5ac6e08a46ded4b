"""LoRA adapters: requests for them, their files and weights, and the ones that an engine holds."""

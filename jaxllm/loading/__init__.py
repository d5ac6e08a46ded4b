"""Load weights from a hub repository, a folder of safetensors or a GGUF file, or fill them with random numbers."""

"""Routes for those who run a server: health, metrics, load, adapters, and vLLM's development routes."""

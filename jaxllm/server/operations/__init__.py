"""The routes for operators: health, metrics, load, adapters, and vLLM's development routes."""

"""OpenAI's chat completions, completions and models, and vLLM's routes for tokenization."""

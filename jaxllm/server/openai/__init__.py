"""OpenAI's chat and text completions, models, and vLLM's routes for tokens."""

"""OpenAI's Responses, translated to chat completions."""

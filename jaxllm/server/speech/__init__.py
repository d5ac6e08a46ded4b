"""OpenAI's routes that turn speech into text."""

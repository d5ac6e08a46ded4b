"""Commands that talk to a model from a terminal: `chat` and `complete`, with a local model or a server's."""

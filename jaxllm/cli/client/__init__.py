"""Commands that talk with a model from a terminal: `chat` and `complete`, on this machine or a server's."""

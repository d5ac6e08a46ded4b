"""Drafts: guesses of a request's next tokens, which one step of the model checks all at once."""

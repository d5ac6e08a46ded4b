"""Guess a request's next tokens; one step of the model checks all guesses at once."""

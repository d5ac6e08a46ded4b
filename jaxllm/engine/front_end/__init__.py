"""The front end speaks text: it checks and tokenizes requests, makes outputs of tokens, and counts."""

"""The front end: check and tokenize requests, turn the core's tokens into outputs, count and trace."""

"""Commands for the models in the hub's cache: `pull`, `list` and `rm`."""

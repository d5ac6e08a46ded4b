"""Commands that work through a file of requests: `run-batch`, `generate` and `embed`."""

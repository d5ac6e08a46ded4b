"""The engine: requests in, outputs out, around the core that plans, runs and commits steps."""

"""The asynchronous engine: each request is a stream of outputs on an event loop."""

"""The OpenAI-compatible server: HTTP and gRPC in front of an `EngineClient`."""

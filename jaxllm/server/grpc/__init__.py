"""The gRPC server beside HTTP, with the same engine; its requests are like those of `/v1/completions`."""

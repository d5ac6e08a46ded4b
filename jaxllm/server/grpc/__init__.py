"""gRPC beside HTTP, in front of the same engine: requests are admitted as those of `/v1/completions` are."""

"""The command `jaxllm bench`: measurements of an engine and of servers."""

"""vLLM's import path for the return type of `AsyncLLM.add_request`."""

from jaxllm.engine.online.request_stream import RequestOutputCollector

__all__ = ["RequestOutputCollector"]

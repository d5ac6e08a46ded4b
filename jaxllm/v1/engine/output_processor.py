"""vLLM's import path for what `AsyncLLM.add_request` returns."""

from jaxllm.engine.online.request_stream import RequestOutputCollector

__all__ = ["RequestOutputCollector"]

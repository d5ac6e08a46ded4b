"""vLLM's import path for the return type of `LLM.get_metrics`."""

from jaxllm.engine.front.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]

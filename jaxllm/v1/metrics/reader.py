"""vLLM's import path for what `LLM.get_metrics` returns."""

from jaxllm.engine.front.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]

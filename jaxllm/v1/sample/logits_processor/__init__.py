"""vLLM's import path for logits processor classes."""

from jaxllm.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"]

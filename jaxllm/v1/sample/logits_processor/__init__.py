"""vLLM's import path for logits processors that are classes."""

from jaxllm.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"]

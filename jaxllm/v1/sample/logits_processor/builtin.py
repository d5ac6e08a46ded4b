"""vLLM's import path for the function that keeps a dict of states in step with a batch."""

from jaxllm.logits_processors import process_dict_updates

__all__ = ["process_dict_updates"]

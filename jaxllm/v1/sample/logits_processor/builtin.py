"""vLLM's import path for the function that follows a batch with a dict."""

from jaxllm.logits_processors import process_dict_updates

__all__ = ["process_dict_updates"]

"""Which tokens begin and end a model's reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.constraints.thinking import ThinkingTokens
    from jaxllm.engine.tokenizer import Tokenizer

COMMON = ("<think>", "</think>")


def thinking_tokens(config: EngineConfig, tokenizer: Tokenizer | None) -> ThinkingTokens | None:
    """Return the tokens that reasoning_config names, else those of <think> and </think> if each is one token.

    None if the model is not known to reason. Raises VLLMValidationError for a reasoning_config that makes no tokens.
    """
    from jaxllm.constraints.thinking import ThinkingTokens

    group = config.reasoning_config
    if group is None:
        ids = {} if tokenizer is None else {text: token_id for token_id, text in tokenizer.added_tokens.items()}
        start, end = (ids.get(text) for text in COMMON)
        return None if start is None or end is None else ThinkingTokens((start,), (end,))
    if tokenizer is None:
        message = "reasoning_config needs a tokenizer; leave it out with skip_tokenizer_init=True."
        raise VLLMValidationError(message, parameter="reasoning_config", value=group)
    texts = [group.reasoning_start_str, group.reasoning_end_str]
    start_ids, end_ids = tokenizer.encode(texts, {"add_special_tokens": False})
    if not start_ids or not end_ids:
        message = f"reasoning_config: {texts[0]!r} or {texts[1]!r} makes no token of this tokenizer."
        raise VLLMValidationError(message, parameter="reasoning_config", value=group)
    return ThinkingTokens(tuple(start_ids), tuple(end_ids))

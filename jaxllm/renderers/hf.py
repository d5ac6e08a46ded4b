"""vLLM's import path for resolving a tokenizer's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def resolve_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: Any = None,  # noqa: ARG001
) -> str | None:
    """Return the template passed, or the one with this name, or the tokenizer's own; None if it has none.

    `model_config` is vLLM's argument for templates of processors, which are not supported.
    """
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        if chat_template is not None:
            raise
        return None

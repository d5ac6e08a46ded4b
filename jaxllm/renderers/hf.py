"""vLLM's import path of the chat template that a tokenizer has."""

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
    """Return the template given, or the one that a name stands for, or the tokenizer's own; None if it has none.

    `model_config` is vLLM's argument, for templates of processors that are not here.
    """
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        if chat_template is not None:
            raise
        return None

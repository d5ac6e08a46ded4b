"""Make prompts of the queries and documents of a ColBERT model, and keep the vectors of those tokens that count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.params.checks import shown
from jaxllm.resolve.pooling_settings import PoolingSettings, TextForm

if TYPE_CHECKING:
    from jaxllm.engine.front.front_end import FrontEnd


def find_form(settings: PoolingSettings | None, task: str | None, name: str | None) -> TextForm | None:
    """Return the form of texts that `prompt_name` stands for, "query" or "document"; None for no name.

    Raises VLLMValidationError for other names, and for models and tasks without such forms.
    """
    if name is None:
        return None
    forms = {} if settings is None else {"query": settings.query_form, "document": settings.document_form}
    if task != "token_embed" or None in forms.values() or not forms:
        message = f"prompt_name={shown(name)} is for token_embed of models that read queries and documents in forms of "
        message += "their own (ColBERT), and for embed. Leave it out."
        raise VLLMValidationError(message, parameter="prompt_name", value=name)
    form = forms.get(name)
    if form is None:
        message = f"prompt_name={shown(name)} is not supported, only {', '.join(forms)}."
        raise VLLMValidationError(message, parameter="prompt_name", value=name)
    return form


def as_form(front: FrontEnd, form: TextForm, prompt: Any) -> dict[str, Any]:
    """Return the prompt of a text in a form: cut, marked and filled up. Raises VLLMValidationError for no text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str) or (isinstance(prompt, Mapping) and prompt.keys() - {"prompt", "cache_salt"}):
        message = f"prompt_name makes a query or a document of a text, got {shown(prompt)}."
        raise VLLMValidationError(message, parameter="prompt", value=prompt)
    settings, tokenizer = front.ready.pooling, front.require_tokenizer()
    assert settings is not None
    most = front.ready.max_model_len
    keep = min(most, form.max_tokens or most) - (form.mark_id is not None)
    text = form.prompt + text
    text = text.strip() if form.strips else text
    text = tokenizer.reach(text.lower() if settings.lowercases else text, keep, "right")
    [ids] = tokenizer.encode([text], keep=keep, side="right")
    marks = [] if form.mark_id is None else [form.mark_id]
    ids = [*ids[:1], *marks, *ids[1:]]
    fillers = [form.filler_id] * (min(most, form.filled_to) - len(ids))
    return {**(prompt if isinstance(prompt, Mapping) else {}), "prompt": None, "prompt_token_ids": ids + fillers}


def counted(output: PoolingRequestOutput[Any], form: TextForm | None) -> PoolingRequestOutput[Any]:
    """Return an output with the vectors [tokens, o] of those tokens alone that count in scores."""
    if form is None or not form.skipped_ids or output.error is not None:
        return output
    vectors = output.outputs.data[~np.isin(output.prompt_token_ids, form.skipped_ids)]
    return dataclasses.replace(output, outputs=dataclasses.replace(output.outputs, data=vectors))

"""Parse the forms that a prompt may have, and refuse unsupported ones by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_str, has_length, shown

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "text_pair", "token_type_ids")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt: text to tokenize, or token ids with their text if known."""

    text: str | None
    token_ids: Sequence[Any] | None = None
    salt: str | None = None
    is_templated: bool = False
    """Whether the text already has its special tokens."""
    pair: str | None = None
    """The second text of a pair; `text` is the first."""
    type_ids: Sequence[Any] | None = None
    """For each token id, 0 in the first text of a pair and 1 in the second."""


def is_single_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is one prompt and not a batch: text, a dict, or a list of token ids."""
    if isinstance(prompts, (str, bytes, Mapping, ParsedPrompt)):
        return True
    if not _is_id_list(prompts):
        message = f"prompts must be one prompt or a list of them, got {shown(prompts)} ({type(prompts).__name__})."
        raise VLLMValidationError(message, parameter="prompts", value=prompts)
    return len(prompts) > 0 and not isinstance(prompts[0], ParsedPrompt) and not hasattr(prompts[0], "__len__")


def parse_prompt(prompt: Any, label: str) -> ParsedPrompt:
    """Parse a prompt in any form."""
    if isinstance(prompt, ParsedPrompt):
        _check_salt(prompt.salt, label)
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, label)
    if _is_id_list(prompt):
        return ParsedPrompt(None, prompt)
    message = f"{label}: a prompt is a str, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
    raise VLLMValidationError(
        f"{message}; got {shown(prompt)} ({type(prompt).__name__}).", parameter="prompt", value=prompt
    )


def begin_with(before: str, prompt: Any) -> Any:
    """Return a prompt with another text in front; a prompt without text is unchanged."""
    if isinstance(prompt, str):
        return before + prompt
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str) and prompt.get("prompt_token_ids") is None:
        return {**prompt, "prompt": before + prompt["prompt"]}
    return prompt


def _parse_mapping(prompt: Mapping[str, Any], label: str) -> ParsedPrompt:
    fields = {name: value for name, value in prompt.items() if value is not None}
    for name, value in fields.items():
        if name not in _KEYS:
            message = f"{label}: {name!r} is not supported; a prompt takes {', '.join(_KEYS)}."
            raise VLLMValidationError(message, parameter=str(name), value=value)
    text, token_ids, salt, pair, type_ids = (fields.get(name) for name in _KEYS)
    if text is None and token_ids is None:
        raise VLLMValidationError(f"{label}: needs 'prompt' or 'prompt_token_ids'.", parameter="prompt", value=prompt)
    if text is not None and not isinstance(text, str):
        raise VLLMValidationError(
            f"{label}: 'prompt' must be a str, got {shown(text)}.", parameter="prompt", value=text
        )
    if token_ids is not None and not _is_id_list(token_ids):
        message = f"{label}: 'prompt_token_ids' must be a list of integers, got {shown(token_ids)}."
        raise VLLMValidationError(message, parameter="prompt_token_ids", value=token_ids)
    _check_pair(text, token_ids, pair, type_ids, label)
    _check_salt(salt, label)
    return ParsedPrompt(text, token_ids, salt, pair=pair, type_ids=type_ids)


def _check_pair(text: Any, token_ids: Any, pair: Any, type_ids: Any, label: str) -> None:
    if pair is not None and (not isinstance(pair, str) or text is None or token_ids is not None):
        message = f"{label}: 'text_pair' is a str that goes with 'prompt' as text, got {shown(pair)}."
        raise VLLMValidationError(message, parameter="text_pair", value=pair)
    if type_ids is not None and (token_ids is None or not _is_id_list(type_ids) or len(type_ids) != len(token_ids)):
        message = f"{label}: 'token_type_ids' has a number for each of 'prompt_token_ids', got {shown(type_ids)}."
        raise VLLMValidationError(message, parameter="token_type_ids", value=type_ids)


def _check_salt(salt: Any, label: str) -> None:
    if salt is not None:
        check_str(f"{label}: 'cache_salt'", salt, INT32_MAX, parameter="cache_salt")


def _is_id_list(value: Any) -> bool:
    """Return whether `value` can be token ids: a sequence other than text, or a NumPy array with an axis."""
    is_sequence = has_length(value) and hasattr(value, "__getitem__")
    return is_sequence and not isinstance(value, (str, bytes, Mapping))

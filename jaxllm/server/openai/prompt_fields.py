"""The prompt fields that all routes which run the model share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from jaxllm.exceptions import VLLMValidationError

_COMPILED = re.compile(r"^structured_outputs did not compile: (?:structured_outputs\.\w+: )?")
"""How the engine's errors name a grammar that comes from another field."""
MAX_MESSAGES = 16_384
"""The maximum number of messages of a conversation."""
MAX_TOOLS = 4_096
"""The maximum number of tools of a request."""
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]
MAX_PROMPTS = 1024
"""The default maximum number of prompts of a request."""


class PromptFields(msgspec.Struct, kw_only=True):
    """A request's fields for tokenizing and queueing its prompts."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    user: str | None = None
    """It has no effect on the answer."""

    def tokenization_kwargs(self) -> dict[str, Any] | None:
        """Return the request's options for tokenization; None if it has none."""
        names = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None} or None


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors raised inside name the request's own field."""
    try:
        yield
    except VLLMValidationError as error:
        name = names.get(error.parameter or "")
        if name is None or name == error.parameter:
            raise
        message = str(error) if name == "structured_outputs" else _COMPILED.sub("cannot be enforced: ", str(error))
        shown_name = "" if re.search(rf"\b{re.escape(name)}\b", message) else f"{name}: "
        raise VLLMValidationError(f"{shown_name}{message}", parameter=name, value=error.value) from error


def several_prompts(name: str, value: Any, most: int = MAX_PROMPTS) -> list[Any]:
    """Return a text, token ids, or a list of either as a list of prompts. Raises VLLMValidationError for a list that
    is empty, is longer than `most`, or mixes ids with others.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise VLLMValidationError(f"{name} must not be an empty list.", parameter=name, value=value)
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if int in kinds:
        message = f"{name} must be a text, token ids, or a list of either: it has ids beside texts or lists."
        raise VLLMValidationError(message, parameter=name)
    if len(value) > most:
        message = f"{name} must be a list of at most {most}, got {len(value)}."
        raise VLLMValidationError(message, parameter=name, value=len(value))
    return value

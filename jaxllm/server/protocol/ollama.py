"""Ollama's requests and answers."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "num_predict": "max_tokens",
    "stop": "stop",
    "seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""What `options` may say, and what chat completions call it. The others have no effect: they are about the machine."""


class OllamaFields(msgspec.Struct, kw_only=True):
    """What requests for text have in common."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    """Whether the model reasons; "low", "medium" or "high" for those that take it so."""
    keep_alive: float | str | None = None
    """It has no effect: the model stays."""


class OllamaChatRequest(OllamaFields, kw_only=True):
    """What `/api/chat` takes."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """What `/api/generate` takes."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    """The prompt is no message: it is not put into the chat template."""


GENERATE_REFUSED = {
    "images": "this engine reads text only",
    "suffix": "text is only ever added at the end",
    "template": "the model's own chat template is used; with raw=true none is",
    "context": "send the conversation to /api/chat",
}
"""Fields that would change the answer and that have no meaning here."""


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of an answer, or what is new of it."""

    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a line of one that is streamed; the last line has the counts, and times in nanoseconds."""

    model: str
    created_at: str
    message: OllamaMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    """The text of `/api/generate`."""
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """What `/api/show` takes."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""


class OllamaError(msgspec.Struct, frozen=True):
    """The body of an answer that is an error."""

    error: str

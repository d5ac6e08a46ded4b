"""Anthropic's Messages: the request, and the errors of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.server.openai.prompt_fields import Messages, Tools
from jaxllm.server.openai.sampling_fields import REFUSED


class MessagesRequest(msgspec.Struct, kw_only=True):
    """What `/v1/messages` takes. Fields that are not here have no effect."""

    model: str | None = None
    messages: Messages
    max_tokens: int | None = None
    """Required, but to count tokens."""
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """The JSON schema of the answer as `format`, and how hard the model should think as `effort`."""
    metadata: dict[str, Any] | None = None
    """It has no effect."""
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """These last three are vLLM's, and mean what they do in chat."""


MESSAGES_REFUSED: Mapping[str, str] = {
    "output_format": "use output_config.format",
    "mcp_servers": "tools are called by clients; the server runs none itself",
    "container": "tools are called by clients; the server runs none itself",
    **{
        name: REFUSED[name]
        for name in ("watermarking", "kv_transfer_params", "ec_transfer_params", "mm_payload", "return_mm_kwargs")
    },
}
"""Fields that would change the answer and that have no meaning here."""


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request."""

    input_tokens: int
    """The tokens of the prompt that the prefix cache neither had nor keeps; all, if the server does not tell."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    """The tokens that the cache keeps from now on, and those that it had, if the server has
    --enable-prompt-tokens-details."""
    output_tokens: int


class MessagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    """Blocks of type "thinking", "text" and "tool_use"."""
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessagesErrorInfo(msgspec.Struct, frozen=True):
    """An error as Anthropic's clients read it."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer that is an error."""

    type: str = "error"
    error: MessagesErrorInfo
    request_id: str


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's names of errors by status; the others are "invalid_request_error" below 500, and "api_error"."""

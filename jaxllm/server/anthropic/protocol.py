"""The types of Anthropic's Messages: requests, answers and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.server.openai.prompt_fields import Messages, Tools
from jaxllm.server.openai.sampling_fields import REFUSED


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The request of `/v1/messages`. Other fields have no effect."""

    model: str | None = None
    messages: Messages
    max_tokens: int | None = None
    """Required, except for counting tokens."""
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
    """`format` is the answer's JSON schema, `effort` the effort of thinking."""
    metadata: dict[str, Any] | None = None
    """It has no effect."""
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """These last three are vLLM's, as in chat."""


MESSAGES_REFUSED: Mapping[str, str] = {
    "output_format": "use output_config.format",
    "mcp_servers": "tools are called by clients; the server runs none itself",
    "container": "tools are called by clients; the server runs none itself",
    **{
        name: REFUSED[name]
        for name in ("watermarking", "kv_transfer_params", "ec_transfer_params", "mm_payload", "return_mm_kwargs")
    },
}
"""Fields that are refused: they would change the answer and are not supported."""


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The token usage of a request."""

    input_tokens: int
    """The prompt's tokens neither read from nor added to the cache; all, if the server does not report these."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    """The tokens added to and read from the prefix cache, if the server has --enable-prompt-tokens-details."""
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
    """The body of an error answer."""

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
"""Anthropic's error types by status; others are "invalid_request_error" below 500 and "api_error" above."""

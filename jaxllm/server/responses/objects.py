"""The types of OpenAI's Responses: the response and its items."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxllm.server.openai.logprobs import ChatTokenLogprob
from jaxllm.server.responses.request import IncompleteReason, PromptCacheOptions, ReasoningOptions, TextOptions

type ItemStatus = Literal["in_progress", "completed", "incomplete"]
type ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text that the model reasons in."""

    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []
    """With `include=["message.output_text.logprobs"]`: an entry for each token."""


type Part = OutputText | ReasoningText


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thinks before it answers."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: None = None
    status: ItemStatus


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model calls."""

    id: str
    call_id: str
    """The id that the function's result refers to."""
    name: str
    arguments: str
    """The arguments as JSON text, unless the call is incomplete."""
    status: ItemStatus


type OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the input's tokens."""

    cached_tokens: int
    """The number taken from the prefix cache; 0 unless the server has --enable-prompt-tokens-details."""
    cache_write_tokens: int = 0
    """The number added to the prefix cache; 0 without that flag."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the output's tokens."""

    reasoning_tokens: int
    """The number of tokens in the reasoning's text."""


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The token usage of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """The error of a failed response."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: IncompleteReason


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response: its output, and the settings of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    prompt_cache_options: PromptCacheOptions | None = None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a response's deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True

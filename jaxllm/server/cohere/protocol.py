"""The types of Cohere's chat: requests, answers and errors, as in https://docs.cohere.com/reference/chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.params.checks import INT32_MAX
from jaxllm.server.openai.prompt_fields import Messages, Tools
from jaxllm.server.openai.sampling_fields import REFUSED


class CohereThinking(msgspec.Struct, frozen=True):
    """Whether the model thinks, and for how many tokens."""

    type: Literal["enabled", "disabled"]
    token_budget: Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)] | None = None


class CohereCitationOptions(msgspec.Struct, frozen=True):
    """How an answer cites documents. Only the modes without citations are supported."""

    mode: Literal["OFF", "DISABLED"] | None = None


class CohereResponseFormat(msgspec.Struct, frozen=True):
    """The form of an answer."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    """The schema of a JSON object."""


class CohereDocument(msgspec.Struct, frozen=True):
    """A document that an answer may use."""

    data: str | dict[str, Any]
    id: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Return the document as chat templates read it."""
        data = {"text": self.data} if isinstance(self.data, str) else self.data
        return data if self.id is None else {"id": self.id, **data}


class CohereChatRequest(msgspec.Struct, kw_only=True):
    """The request of `/v2/chat`. Other fields have no effect."""

    model: str | None = None
    messages: Messages
    stream: bool = False
    tools: Tools | None = None
    strict_tools: bool = False
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: list[str | CohereDocument] | None = None
    """They need a chat template that shows documents."""
    citation_options: CohereCitationOptions | None = None
    response_format: CohereResponseFormat | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF"] | None = None
    """Modes other than OFF need a chat template with the variable `safety_mode`."""
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = None
    p: float | None = None
    logprobs: bool = False
    thinking: CohereThinking | None = None
    priority: int = 0
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's field, as in chat."""


COHERE_CHAT_REFUSED: Mapping[str, str] = {
    name: REFUSED[name] for name in ("watermarking", "kv_transfer_params", "ec_transfer_params")
}
"""Fields that are refused: they would change the answer and are not supported."""


class CohereTokens(msgspec.Struct, frozen=True):
    """The numbers of a request's tokens."""

    input_tokens: int
    output_tokens: int


class CohereUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The token usage of a request."""

    billed_units: CohereTokens
    tokens: CohereTokens
    """The same numbers: all tokens count."""
    cached_tokens: int | UnsetType = UNSET
    """The tokens read from the prefix cache, if the server has --enable-prompt-tokens-details."""


class CohereLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of tokens in a row, and their text."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message of an answer. Fields without a value are left out."""

    role: str
    content: list[dict[str, Any]] = []
    """Blocks of type "thinking" and "text"."""
    tool_calls: list[dict[str, Any]] = []


class CohereChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    finish_reason: str
    """COMPLETE, STOP_SEQUENCE, MAX_TOKENS or TOOL_CALL."""
    message: CohereMessage
    usage: CohereUsage
    logprobs: list[CohereLogprobs] | UnsetType = UNSET


class CohereChatEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    type: str
    id: str | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """The position among the blocks of the content, or among the calls."""
    delta: dict[str, Any] | UnsetType = UNSET
    logprobs: CohereLogprobs | UnsetType = UNSET


class CohereError(msgspec.Struct, frozen=True):
    """The body of an error answer."""

    message: str
    id: str

"""The types of chat completions: the request, the answer, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int, shown
from jaxllm.params.limits import MAX_N
from jaxllm.server.openai.logprobs import ChatLogprobs, PromptTokenLogprob
from jaxllm.server.openai.prompt_fields import MAX_PROMPTS, Messages, Tools
from jaxllm.server.openai.sampling_fields import REFUSED, SamplingFields
from jaxllm.server.openai.tools import ToolUse, read_tool_use
from jaxllm.server.openai.usage import UsageInfo

_NO_AUDIO = "no model here speaks or hears"
CHAT_REFUSED: Mapping[str, str] = {
    **REFUSED,
    "audio": _NO_AUDIO,
    "functions": "tools have taken their place",
    "function_call": "tool_choice has taken its place",
    "web_search_options": "nothing is searched for",
    "prediction": "leave it out",
}
"""Fields that are refused: they would change the answer and are not supported."""
MEDIA_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields of conversations that concern their images and videos."""


class ChatFields(SamplingFields, kw_only=True):
    """The fields of chat requests besides the conversation: OpenAI's and vLLM's."""

    max_completion_tokens: int | None = None
    """It takes precedence over `max_tokens`."""
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool = False
    """Begin the answer with the last message, if it has the answer's role."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's image processor, for a model that takes images."""
    media_io_kwargs: dict[str, Any] | None = None
    """Which frames of videos are taken, for a model that takes videos."""
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    """Chat templates get it by this name, and as `enable_thinking`, which is false for "none"."""
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    include_reasoning: bool = True
    """Whether the answer shows its reasoning, if the server separates it from the text."""
    modalities: list[str] | None = None
    return_prompt_text: bool = False
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """These last four have no effect."""

    def check(self, *, trusts_template: bool) -> None:
        """Check the fields before any work is done. Raises VLLMValidationError."""
        self.check_fields()
        if self.max_completion_tokens is not None:
            check_int("max_completion_tokens", self.max_completion_tokens, 1, INT32_MAX)
        if self.top_logprobs and not self.logprobs:
            message = "when using `top_logprobs`, `logprobs` must be set to true."
            raise VLLMValidationError(message, parameter="top_logprobs", value=self.top_logprobs)
        if self.logprob_token_ids and not self.logprobs:
            message = "when using `logprob_token_ids`, `logprobs` must be set to true."
            raise VLLMValidationError(message, parameter="logprob_token_ids", value=self.logprob_token_ids)
        has_template = self.chat_template is not None or "chat_template" in (self.chat_template_kwargs or {})
        if has_template and not trusts_template:
            name = "chat_template" if self.chat_template is not None else "chat_template_kwargs"
            message = "a request's chat template is not run unless the server has --trust-request-chat-template."
            raise VLLMValidationError(f"{name}: {message}", parameter=name)
        if self.modalities not in (None, ["text"]):
            message = f"modalities must be ['text'], got {shown(self.modalities)}: {_NO_AUDIO}."
            raise VLLMValidationError(message, parameter="modalities", value=self.modalities)

    @property
    def constraint(self) -> str:
        """Return the name of the field that constrains the text."""
        is_of_tools = self.tools and self.structured_outputs is None and self.response_format is None
        return "tools" if is_of_tools else super().constraint

    def tool_use(self) -> ToolUse:
        """Return the tools that the answer may call. Raises VLLMValidationError."""
        return read_tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def most_tokens(self) -> int | None:
        """Return the maximum number of tokens of the answer; None if unset."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of log-probabilities listed at each token; None for none, or for all requested ones."""
        return None if not self.logprobs or self.logprob_token_ids else self.top_logprobs or 0


class ChatCompletionRequest(ChatFields, kw_only=True):
    """The request of `/v1/chat/completions`."""

    messages: Messages

    def echoed(self, role: str) -> str:
        """Return the text that the answer begins with: with `echo` the last message's, if it has this `role`."""
        last = self.messages[-1]
        if not self.echo or last.get("role") != role:
            return ""
        content = last.get("content") or ""
        if isinstance(content, str):
            return content
        return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)


class BatchChatCompletionRequest(ChatFields, kw_only=True):
    """The request of `/v1/chat/completions/batch`: several conversations with the same fields."""

    messages: Annotated[list[Messages], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]

    def conversations(self) -> list[ChatCompletionRequest]:
        """Return the request of each conversation. Raises VLLMValidationError for fields that need a single one."""
        for name in ("stream", "use_beam_search", "prompt_logprobs", "return_prompt_text"):
            if getattr(self, name) not in (None, False):
                message = f"{name} is not available for several conversations: send each to /v1/chat/completions."
                raise VLLMValidationError(message, parameter=name)
        fields = {name: getattr(self, name) for name in ChatFields.__struct_fields__}
        return [ChatCompletionRequest(messages=each, **fields) for each in self.messages]

    def num_sequences(self) -> int:
        """Return the total number of answers. Raises VLLMValidationError for more than a request may have."""
        n = 1 if self.n is None else check_int("n", self.n, 1, MAX_N)
        if len(self.messages) * n > MAX_N:
            message = f"n={n} for each of {len(self.messages)} conversations makes more than {MAX_N} answers."
            raise VLLMValidationError(f"{message} Send fewer at once, or a smaller n.", parameter="n", value=n)
        return len(self.messages) * n


def conversation(request: Any, messages: list[dict[str, Any]], **more: Any) -> ChatCompletionRequest:
    """Return the chat request for a conversation, with the rendering fields of another request and `more` fields."""
    names = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", *MEDIA_FIELDS)
    return ChatCompletionRequest(messages=messages, **{name: getattr(request, name) for name in names}, **more)


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function call, or its delta."""

    name: str | UnsetType = UNSET
    arguments: str
    """The arguments as JSON text."""


class ToolCallMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an answer."""

    id: str
    type: str = "function"
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The delta of a call. The first one has the id, the type and the function's name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of an answer."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCallMessage] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The older name of `reasoning`."""


class ChatCompletionResponseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: str = "chat.completion"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[ChatCompletionResponseChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class DeltaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The delta of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The older name of `reasoning`."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatCompletionResponseStreamChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The delta of one of the n answers."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionStreamResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET

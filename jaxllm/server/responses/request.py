"""The request of OpenAI's Responses, and its conversion to a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_choice, check_int, shown
from jaxllm.server.openai.chat_protocol import MEDIA_FIELDS, ChatCompletionRequest
from jaxllm.server.openai.prompt_fields import Tools
from jaxllm.server.openai.sampling_fields import REFUSED, TokenFields
from jaxllm.server.openai.tools import LEFT_OUT

_CHAT = "use /v1/chat/completions"
RESPONSES_REFUSED: Mapping[str, str] = {
    **REFUSED,
    "messages": "a response's conversation is its input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "reasoning_effort": "use reasoning={'effort': ...}",
    "response_format": "use text={'format': ...}",
    "n": f"a response has one answer; {_CHAT}",
    "logprobs": "use include=['message.output_text.logprobs']",
    "prompt_logprobs": _CHAT,
    "logprob_token_ids": _CHAT,
    "use_beam_search": _CHAT,
    "conversation": "use previous_response_id",
    "prompt": "no prompts are kept; use input",
    "context_management": "use truncation",
    "enable_response_messages": "a response has its items in output, and its input is not shown",
    "previous_input_messages": "use previous_response_id, or send the conversation as input",
}
"""Fields that are refused: they would change the answer and are not supported."""
_LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that shows log-probabilities."""
INCLUDABLE = (
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    "message.input_image.image_url",
)
"""Values of `include` that are accepted, though no response has them."""
MAX_NAME = 1024
"""The maximum number of characters of a field that a response only repeats."""
MAX_INSTRUCTIONS = 2**20
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_REPEATED = ("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

type IncompleteReason = Literal["max_output_tokens", "content_filter"]


class ResponsesStreamOptions(msgspec.Struct, frozen=True):
    """The options of a stream."""

    include_obfuscation: bool | None = None
    """It has no effect: events are never made longer than they are."""


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of reasoning."""

    effort: str | None = None
    """Chat templates get it as `reasoning_effort`, and as `enable_thinking`, which is false for "none"."""
    summary: str | None = None
    """It has no effect: the reasoning itself is shown, without a summary."""


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of an answer's text."""

    type: str
    """It is "text", "json_object" or "json_schema"."""
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """It has no effect: no supported model has it."""


class PromptCacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of prompt caching. They have no effect: prompts are cached by content."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"
    comparison_response_id: str | None = None


class ResponsesRequest(TokenFields, kw_only=True):
    """The request of `/v1/responses`: OpenAI's fields and vLLM's. Tools other than functions are ignored; input items
    that are not part of a conversation are refused.
    """

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    """The system message. A response that continues another does not inherit its instructions."""
    previous_response_id: str | None = None
    store: bool | None = None
    """Whether the response is kept, to be retrieved or continued later."""
    background: bool | None = None
    """Whether the request returns before the answer is made."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """It has no effect: it concerns tools that a server calls, and this one calls none."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool = True
    """Whether the output includes the reasoning."""
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    """How many likely tokens the log-probabilities list, if they are included."""
    include: list[str] | None = None
    truncation: str | None = None
    """With "auto" the oldest messages are dropped if the conversation does not fit."""
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    """These last five have no effect."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's image processor, for a model that takes images."""
    media_io_kwargs: dict[str, Any] | None = None
    """Which frames of videos are taken, for a model that takes videos."""

    @property
    def is_stored(self) -> bool:
        """Return whether the response is kept."""
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of likely tokens listed at each token of a message; None without log-probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    def check(self) -> None:
        """Check the fields before any work is done. Raises VLLMValidationError."""
        for name, least in (("max_output_tokens", 1), ("max_tool_calls", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least, INT32_MAX)
        if self.truncation is not None:
            check_choice("truncation", self.truncation, ("auto", "disabled"))
        self._check_stream()
        self._check_repeated()
        for field in self.include or ():
            if field not in (_LOGPROBS, *INCLUDABLE):
                raise _refusal("include", f"has {shown(field)}, which no response has", field)

    def _check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise _refusal("stream_options", "can only be given when stream is true", None)
        if self.background and not self.is_stored:
            raise _refusal("background", "needs the response to be kept: leave out store=false", True)

    def _check_repeated(self) -> None:
        """Check the sizes of fields that a response repeats."""
        values = {name: getattr(self, name) for name in _REPEATED}
        reasoning = self.reasoning or ReasoningOptions()
        caching = self.prompt_cache_options or PromptCacheOptions()
        inner = (
            ("reasoning", reasoning.effort),
            ("reasoning", reasoning.summary),
            ("prompt_cache_options", caching.comparison_response_id),
        )
        for name, value in (*values.items(), *inner):
            _check_length(name, value, MAX_NAME)
        _check_length("instructions", self.instructions, MAX_INSTRUCTIONS)
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise _refusal("metadata", f"must have at most {MAX_METADATA} keys, got {len(metadata)}", len(metadata))
        for key, value in metadata.items():
            if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                most = f"{MAX_METADATA_KEY} characters, and values of at most {MAX_METADATA_VALUE}"
                raise _refusal("metadata", f"must have keys of at most {most}", key)

    def chat(self, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
        """Return the chat request of a conversation with this request's settings. Raises VLLMValidationError."""
        names = (
            *TokenFields.__struct_fields__,
            "parallel_tool_calls",
            "chat_template",
            "chat_template_kwargs",
            *MEDIA_FIELDS,
        )
        return ChatCompletionRequest(
            **{name: getattr(self, name) for name in names},
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.num_logprobs is not None,
            top_logprobs=self.num_logprobs,
            stream=bool(self.stream or self.background),
            tools=chat_tools(self.tools),
            tool_choice=_chat_choice(self.tool_choice),
            reasoning_effort=self.reasoning and self.reasoning.effort,
            include_reasoning=self.include_reasoning,
            response_format=_response_format(self.text and self.text.format),
        )


def chat_tools(request_tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the functions of `tools` in chat's form; tools of other types are left out and logged.

    Raises VLLMValidationError for a function without a name.
    """
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(request_tools or ()):
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise VLLMValidationError(f"tools[{i}]: needs a type, got {shown(kind)}.", parameter="tools", value=kind)
        if kind != "function":
            LEFT_OUT.note({kind})
            continue
        if not isinstance(tool.get("name"), str):
            message = f"tools[{i}]: a function needs a name, got {shown(tool.get('name'))}."
            raise VLLMValidationError(message, parameter="tools")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        tools.append({"type": "function", "function": function})
    return tools


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a tool choice without the tools that are left out."""
    if (
        not isinstance(choice, dict)
        or choice.get("type") != "allowed_tools"
        or not isinstance(choice.get("tools"), list)
    ):
        return choice
    others = [each for each in choice["tools"] if isinstance(each, dict) and each.get("type") != "function"]
    tools = [each for each in choice["tools"] if each not in others]
    if others and not tools and choice.get("mode") != "required":
        return "none"
    return {**choice, "tools": tools}


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    """Return the answer's format as a chat completion's `response_format`."""
    if form is None:
        return None
    if form.type not in ("text", "json_object", "json_schema"):
        message = f"format.type must be 'text', 'json_object' or 'json_schema', got {shown(form.type)}"
        raise _refusal("text", message, form.type)
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        raise _refusal("text", "format needs a schema", None)
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema, "strict": form.strict}}


def _check_length(name: str, value: str | None, most: int) -> None:
    if value is not None and len(value) > most:
        raise _refusal(name, f"must have at most {most} characters, got {len(value)}", shown(value))


def _refusal(name: str, message: str, value: Any) -> VLLMValidationError:
    return VLLMValidationError(f"{name} {message}.", parameter=name, value=value)

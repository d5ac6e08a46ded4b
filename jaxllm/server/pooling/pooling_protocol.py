"""The fields that all pooling routes share, and the types of `/pooling`, which serves every task."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.openai.chat_protocol import MEDIA_FIELDS, ChatCompletionRequest, conversation
from jaxllm.server.openai.prompt_fields import Messages, PromptFields, renamed, several_prompts
from jaxllm.server.openai.usage import UsageInfo

MAX_INPUTS = 2048
"""The maximum number of inputs of a request, as in OpenAI's API."""
POOLED_REFUSED: Mapping[str, str] = {
    "normalize": "use use_activation instead",
    "softmax": "use use_activation instead",
    "activation": "use use_activation instead",
    "padding": "prompts are not padded",
    "images": "send them in messages",
    "data": "there are no plugins for inputs and outputs",
}
"""Fields of vLLM, present or past, that are refused: they would change the answer."""


_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


class PooledFields(PromptFields, kw_only=True):
    """The fields that all pooling requests share."""

    use_activation: bool | None = None
    """Whether outputs are normalized or made probabilities; by default the model's setting."""

    def fields_named(self, prompt: str) -> AbstractContextManager[None]:
        """Make errors raised inside name the request's own fields; `prompt` is the prompt's field."""
        return renamed(dict.fromkeys(("prompt", "prompt_token_ids", "text_pair", "messages"), prompt))


class InputFields(PooledFields, kw_only=True):
    """The fields of requests with one output per input."""

    input: str | list[str | int | dict[str, Any] | list[int | dict[str, Any]]] | None = None
    """A text, its token ids, a conversation, or a list of either."""
    messages: list[dict[str, Any] | Messages] | None = None
    """One or more conversations to render with the chat template, instead of `input`."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's image processor, for a model that takes images."""
    media_io_kwargs: dict[str, Any] | None = None
    """Which frames of videos are taken, for a model that takes videos."""

    @property
    def source(self) -> str:
        """Return the name of the field with the inputs."""
        return "input" if self.messages is None else "messages"

    def inputs(self) -> list[str | list[int] | ChatCompletionRequest]:
        """Return the inputs: each a text, token ids, or a conversation. Raises VLLMValidationError for any other."""
        if (self.input is None) == (self.messages is None):
            raise VLLMValidationError("give either input or messages.", parameter="input")
        values = several_prompts(self.source, self.input if self.messages is None else self.messages, MAX_INPUTS)
        if isinstance(values[0], dict):
            values = [values]
        return [self._input(each) for each in values]

    def check_template(self, inputs: list[Any]) -> None:
        """Refuse fields for rendering conversations if there is none. Raises VLLMValidationError."""
        if any(isinstance(each, ChatCompletionRequest) for each in inputs):
            return
        for name in (*_TEMPLATE_FIELDS, *MEDIA_FIELDS):
            if getattr(self, name):
                raise VLLMValidationError(f"{name} goes with messages: leave it out.", parameter=name)

    def _input(self, value: Any) -> str | list[int] | ChatCompletionRequest:
        if isinstance(value, str):
            return value
        kinds = {type(each) for each in value} if isinstance(value, list) else set[type]()
        if kinds == {dict}:
            return conversation(self, value)
        if kinds - {int} or not isinstance(value, list):
            message = (
                f"{self.source} must be a text, token ids, messages, or a list of one of them, got {shown(value)}."
            )
            raise VLLMValidationError(message, parameter=self.source, value=value)
        return value


class VectorFields(InputFields, kw_only=True):
    """The fields of requests for vectors: their size and encoding."""

    dimensions: int | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = "float"
    """With the last two the answer is raw bytes; "bytes" adds a header that describes them."""
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "float32"
    """The type of the numbers in base64 and bytes."""
    endianness: Literal["native", "little", "big"] = "native"
    """The byte order of these numbers; "native" is the server's."""

    @property
    def is_in_bytes(self) -> bool:
        """Return whether the answer is raw bytes."""
        return self.encoding_format in ("bytes", "bytes_only")

    def params(self, task: str) -> PoolingParams:
        """Return the engine's params. Raises VLLMValidationError."""
        return PoolingParams(task=task, dimensions=self.dimensions, use_activation=self.use_activation)


class PoolingRequest(VectorFields, kw_only=True):
    """The request of `/pooling`."""

    task: str | None = None
    """A task of the model; by default its main one."""
    prompt_name: str | None = None
    """"query" or "document": read the texts as a ColBERT model does, and return the vectors that count in scores."""


class PoolingResponseData(msgspec.Struct, frozen=True, kw_only=True):
    """The output for one input."""

    index: int
    object: str = "pooling"
    data: list[list[float] | float] | str
    """A vector, or one for each token; concatenated in base64."""


class PoolingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/pooling`."""

    id: str
    object: str = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    data: list[PoolingResponseData]
    usage: UsageInfo

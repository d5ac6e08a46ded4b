"""The types of tokenization: requests and answers of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.openai.chat_protocol import MEDIA_FIELDS, ChatCompletionRequest, conversation
from jaxllm.server.openai.prompt_fields import Messages, Tools

_CHAT_FIELDS = ("documents", "reasoning_effort", "tools", "tool_choice")
"""Fields of chat completions that chat templates may show."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The request of `/tokenize`: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """By default a text gets them, and a conversation only those of its template."""
    return_token_strs: bool | None = False
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
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None

    def check(self) -> None:
        """Raise VLLMValidationError unless there is either a prompt or a conversation, with its fields."""
        if (self.prompt is None) == (self.messages is None):
            raise VLLMValidationError("give either prompt or messages.", parameter="prompt")
        for name in ("chat_template", "chat_template_kwargs", *MEDIA_FIELDS, *_CHAT_FIELDS):
            if self.messages is None and getattr(self, name) is not None:
                raise VLLMValidationError(f"{name} goes with messages: leave it out.", parameter=name)

    def chat(self) -> ChatCompletionRequest:
        """Return the chat request of the conversation."""
        more = {name: getattr(self, name) for name in _CHAT_FIELDS}
        return conversation(self, self.messages or [], **more)


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens' texts, if requested."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The request of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids, special tokens included."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer's configuration, under the names of transformers' tokenizer_config.json."""

    vocab_size: int
    """The number of token ids with a text; the model may have more."""
    eos_token_id: int | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    added_tokens: dict[int, str]
    truncation_side: str
    chat_template: str | dict[str, str] | None
    """The template that conversations are rendered with, or several by their names."""

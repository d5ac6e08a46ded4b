"""Serve Anthropic's Messages by way of chat completions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.anthropic.events import MessageBuilder, frames
from jaxllm.server.anthropic.input import as_chat
from jaxllm.server.anthropic.protocol import (
    ERROR_TYPES,
    MessagesError,
    MessagesErrorInfo,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.errors import ErrorResponse, error_response
from jaxllm.server.http.sse import EventStream, named_event
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.openai.serving_chat import OpenAIServingChat

_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
}


class AnthropicServingMessages:
    """Answers Anthropic's requests."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        """Answer by way of `chat`."""
        self._chat = chat

    async def answer(self, request: MessagesRequest, caller: Caller) -> EventStream | MessagesResponse:
        """Answer a request; a stream is returned once it is admitted. Raises exceptions that `refusal` handles."""
        if request.max_tokens is None:
            raise VLLMValidationError("max_tokens: a number is needed.", parameter="max_tokens")
        args, request_id = self._chat.args, caller.request_id
        builder = MessageBuilder(
            f"msg_{request_id}", self._chat.models.shown(request.model), tells_cached=args.enable_prompt_tokens_details
        )
        chat = self._as_chat(request)
        with self._fields_named(chat):
            turn = await self._chat.begin(chat, caller)
        if request.stream:
            events = frames(turn, builder, args.sse_ping_interval)
            return EventStream(
                events,
                turn.outputs,
                last=b"",
                failed=lambda error: named_event("error", failed(error_response(error), request_id)),
            )
        output = await turn.whole()
        builder.start(output)
        [only] = output.outputs
        builder.add(turn.pieces(only), len(only.token_ids))
        builder.finish(only)
        return builder.message()

    async def count_tokens(self, request: MessagesRequest) -> TokenCount:
        """Return the number of tokens of a request's prompt."""
        chat = self._as_chat(request)
        with self._fields_named(chat):
            self._chat.check(chat)
            chat.tool_use()
            prompt = await self._chat.render(chat)
            encoded = await encode_prompt(self._chat.engine_client.front.inputs, prompt)
        return TokenCount(len(encoded.token_ids))

    def _as_chat(self, request: MessagesRequest) -> ChatCompletionRequest:
        return as_chat(request, has_thinking_tokens=self._chat.engine_client.front.ready.has_thinking_tokens)

    @contextlib.contextmanager
    def _fields_named(self, chat: ChatCompletionRequest) -> Iterator[None]:
        """Make errors raised inside name the request's own fields."""
        with renamed(_NAMES), chat.fields_named("messages"), self._told_of_length():
            yield

    @contextlib.contextmanager
    def _told_of_length(self) -> Iterator[None]:
        """Reword the error of a too long prompt so that Claude Code recognizes it and shortens the prompt."""
        try:
            yield
        except VLLMValidationError as error:
            if error.parameter != "prompt" or not isinstance(error.value, int):
                raise
            most = self._chat.engine_client.model_config.max_model_len - 1
            message = f"prompt is too long: {error.value} tokens > {most} maximum (system, tools and messages together)"
            raise VLLMValidationError(message, parameter="messages", value=error.value) from error


def failed(response: ErrorResponse, request_id: str) -> MessagesError:
    """Return an error in Anthropic's form."""
    info = response.error
    kind = ERROR_TYPES.get(info.code, "api_error" if info.code >= 500 else "invalid_request_error")
    return MessagesError(error=MessagesErrorInfo(kind, info.message), request_id=f"req_{request_id}")

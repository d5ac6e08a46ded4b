"""Anthropic's Messages, answered as chat completions are."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.aside import aside
from jaxllm.server.errors import ErrorResponse, error_response
from jaxllm.server.message_events import MessageBuilder, frames
from jaxllm.server.messages_input import as_chat
from jaxllm.server.protocol.chat import ChatCompletionRequest
from jaxllm.server.protocol.messages import (
    ERROR_TYPES,
    MessagesError,
    MessagesErrorInfo,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)
from jaxllm.server.protocol.prompts import renamed
from jaxllm.server.serving_chat import OpenAIServingChat
from jaxllm.server.sse import EventStream, named_event

_NAMES = {"stop": "stop_sequences", "thinking_token_budget": "thinking"}


class AnthropicServingMessages:
    """This answers Anthropic's requests."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        """Answer as `chat` does."""
        self._chat = chat

    async def answer(
        self, request: MessagesRequest, request_id: str, trace_headers: Mapping[str, str] | None = None
    ) -> EventStream | MessagesResponse:
        """Answer a request; a stream is returned once it is admitted. Raises what `refusal` has answers for."""
        if request.max_tokens is None:
            raise VLLMValidationError("max_tokens: a number is needed.", parameter="max_tokens")
        args = self._chat.args
        builder = MessageBuilder(
            f"msg_{request_id}", self._chat.models.name, tells_cached=args.enable_prompt_tokens_details
        )
        with renamed(_NAMES):
            turn = await self._chat.begin(self._as_chat(request), request_id, trace_headers)
        if request.stream:
            events = frames(turn, builder, args.sse_ping_interval)
            return EventStream(events, turn.outputs, last=b"", failed=_last_event)
        output = await turn.whole()
        builder.start(output)
        [only] = output.outputs
        builder.add(turn.pieces(only), len(only.token_ids))
        builder.finish(only)
        return builder.message()

    async def count_tokens(self, request: MessagesRequest) -> TokenCount:
        """Return how many tokens the prompt of a request has."""
        chat = self._as_chat(request)
        self._chat.check(chat)
        prompt = await self._chat.render(chat)
        inputs = self._chat.engine_client.front.inputs
        encoded = await aside(len(prompt.text or ""), inputs.encode, prompt)
        return TokenCount(len(encoded.token_ids))

    def _as_chat(self, request: MessagesRequest) -> ChatCompletionRequest:
        return as_chat(request, has_thinking_tokens=self._chat.engine_client.front.ready.has_thinking_tokens)


def _last_event(error: BaseException) -> bytes:
    return named_event("error", failed(error_response(error)))


def failed(response: ErrorResponse) -> MessagesError:
    """Return what Anthropic's clients are told of an error."""
    info = response.error
    kind = ERROR_TYPES.get(info.code, "api_error" if info.code >= 500 else "invalid_request_error")
    return MessagesError(error=MessagesErrorInfo(kind, info.message))

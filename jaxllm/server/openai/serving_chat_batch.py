"""Serve several conversations of one request: all are queued, or none, and all answers come together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.several import read_all
from jaxllm.server.openai.chat_protocol import BatchChatCompletionRequest, ChatCompletionResponse
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.turns import Turn
from jaxllm.server.openai.usage import PromptTokensDetails, make_usage


class OpenAIServingChatBatch:
    """Answers `/v1/chat/completions/batch`."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        """Answer each conversation as `chat` does."""
        self._chat = chat

    async def answer(self, request: BatchChatCompletionRequest, caller: Caller) -> ChatCompletionResponse:
        """Answer a request; the n answers to the first conversation come first, as in completions.

        Raises exceptions that `error_response` handles.
        """
        requests = request.conversations()
        self._chat.engine_client.admission.check_room(request.num_sequences())  # before any of them is rendered
        turns: list[Turn] = []
        try:
            for i, one in enumerate(requests):
                with _numbered(i), request.fields_named("messages"):
                    turns.append(await self._chat.begin(one, caller._replace(request_id=f"{caller.request_id}-{i}")))
        except BaseException:
            for turn in turns:
                await turn.outputs.aclose()
            raise
        finals = await read_all([turn.outputs for turn in turns])
        answered = list(zip(requests, turns, finals, strict=True))
        choices = [self._chat.choice(one, each, turn.reader) for one, turn, final in answered for each in final.outputs]
        reasoning = [await turn.reader.num_reasoning_tokens() for turn in turns]
        known = [each for each in reasoning if each is not None]
        tells_cached = self._chat.args.enable_prompt_tokens_details
        return ChatCompletionResponse(
            id=caller.shown_id("chatcmpl", request.request_id),
            model=self._chat.models.shown(request.model),
            choices=[msgspec.structs.replace(each, index=i) for i, each in enumerate(choices)],
            usage=make_usage(
                sum(len(final.prompt_token_ids or ()) for final in finals),
                sum(len(each.token_ids) for final in finals for each in final.outputs),
                PromptTokensDetails.sum(map(PromptTokensDetails.of, finals)) if tells_cached else None,
                sum(known) if known else None,
            ),
        )


@contextlib.contextmanager
def _numbered(i: int) -> Iterator[None]:
    """Make errors about a conversation say which one it is."""
    try:
        yield
    except VLLMValidationError as error:
        if error.parameter != "messages":
            raise
        raise VLLMValidationError(f"conversation {i}: {error}", parameter="messages", value=error.value) from error

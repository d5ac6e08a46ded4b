"""Serve Cohere's chat by way of chat completions."""

from __future__ import annotations

from jaxllm.server.cohere.events import CohereMessageBuilder, failed_frame, frames
from jaxllm.server.cohere.input import as_chat
from jaxllm.server.cohere.protocol import CohereChatRequest, CohereChatResponse
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.errors import error_response
from jaxllm.server.http.sse import EventStream
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.openai.serving_chat import OpenAIServingChat

_NAMES = {
    "stop": "stop_sequences",
    "top_k": "k",
    "top_p": "p",
    "thinking_token_budget": "thinking",
}


class CohereServingChat:
    """Answers Cohere's requests."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        """Answer by way of `chat`."""
        self._chat = chat

    async def answer(self, request: CohereChatRequest, caller: Caller) -> EventStream | CohereChatResponse:
        """Answer a request; a stream is returned once it is admitted. Raises exceptions that `refusal` handles."""
        args = self._chat.args
        builder = CohereMessageBuilder(caller.request_id, tells_cached=args.enable_prompt_tokens_details)
        chat = as_chat(request, self._chat.template_knows)
        with renamed(_NAMES), chat.fields_named("messages"):
            turn = await self._chat.begin(chat, caller)
            output = None if request.stream else await turn.whole()
        if output is None:
            return EventStream(
                frames(turn, builder, args.sse_ping_interval),
                turn.outputs,
                failed=lambda error: failed_frame(error_response(error).error.message),
            )
        builder.start(output)
        [only] = output.outputs
        builder.score(only)
        builder.add(turn.pieces(only), len(only.token_ids))
        builder.finish(only, turn.finish_reason(only))
        return builder.message()

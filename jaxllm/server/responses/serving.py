"""Serve OpenAI's Responses by way of chat completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from jaxllm.server.http.caller import Caller
from jaxllm.server.http.sse import EventStream
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.responses.answer import ResponseAnswer
from jaxllm.server.responses.event_log import EventLog
from jaxllm.server.responses.input import messages_of, read_input
from jaxllm.server.responses.kept import KeptResponses, check_unstored
from jaxllm.server.responses.objects import MessageItem, OutputItem, OutputText, Response
from jaxllm.server.responses.request import ReasoningOptions, ResponsesRequest, TextFormat, TextOptions
from jaxllm.server.responses.store import StoredResponse, size_of
from jaxllm.server.responses.truncation import fitted
from jaxllm.utils.async_utils import threaded_if_long

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""The names of chat's fields in Responses."""


class OpenAIServingResponses:
    """Answers Responses."""

    def __init__(
        self, chat: OpenAIServingChat, kept: KeptResponses, counted: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Answer by way of `chat`, and keep responses in `kept`; `counted` counts a background response as load."""
        self._chat, self._kept, self._counted = chat, kept, counted

    async def answer(self, request: ResponsesRequest, caller: Caller) -> EventStream | Response:
        """Answer a request; a stream is returned once it is admitted.

        Raises exceptions that `error_response` handles.
        """
        check_generates(self._chat.engine_client, "Responses")
        self._chat.models.check(request.model)
        kept = self._kept
        if not kept.stores:
            check_unstored(request)
            request = msgspec.structs.replace(request, store=False)
        request.check()
        self._chat.check_top_logprobs(request.top_logprobs)
        earlier, items = kept.earlier(request), read_input(request.input, kept.store.finder())
        asked = (*earlier, msgspec.json.encode(items)) if request.is_stored else ()
        kept.store.check_room(asked)
        past = await threaded_if_long(size_of(earlier), _decoded, earlier)
        response = self._response(request, f"resp_{caller.request_id}")
        chat = request.chat(messages_of(items, request.instructions, past))
        with renamed(_NAMES), chat.fields_named("messages"):
            if request.truncation == "auto":
                chat.messages = await fitted(self._chat, chat)
            turn = await self._chat.begin(chat, caller)

        def keep(response: Response) -> None:
            if request.is_stored:
                turns = (*earlier, msgspec.json.encode([*items, *map(_plain, response.output)]))
                ids = tuple(item.id for item in response.output)
                body = msgspec.json.encode(response)
                kept.store.put(response.id, StoredResponse(body, turns, ids, response.background, log))

        log = EventLog(kept.room) if request.background else None
        answer = ResponseAnswer(response, turn, self._chat, keep, request.num_logprobs)
        if log is not None:
            begun = kept.begin(answer, log, asked, self._counted)
            return kept.stream_of(log, 0) if request.stream else begun
        if request.stream:
            return EventStream(answer.frames(), turn.outputs, last=b"")
        return await answer.whole()

    def _response(self, request: ResponsesRequest, response_id: str) -> Response:
        """Return a response without output."""
        defaults = self._chat.engine_client.front.ready.default_sampling_params
        text = request.text or TextOptions()
        repeated = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
        repeated = (*repeated, "prompt_cache_retention", "prompt_cache_options", "safety_identifier", "user")
        return Response(
            **{name: getattr(request, name) for name in repeated},
            id=response_id,
            created_at=int(time.time()),
            status="queued",
            background=bool(request.background),
            model=self._chat.models.shown(request.model),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning or ReasoningOptions(),
            service_tier=request.service_tier or "default",
            store=request.is_stored,
            temperature=defaults.get("temperature", 1.0) if request.temperature is None else request.temperature,
            text=msgspec.structs.replace(text, format=text.format or TextFormat(type="text")),
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            tools=[tool for tool in request.tools or () if tool.get("type") == "function"],
            top_logprobs=request.top_logprobs or 0,
            top_p=defaults.get("top_p", 1.0) if request.top_p is None else request.top_p,
            truncation=request.truncation or "disabled",
            metadata=request.metadata or {},
        )


def _plain(item: OutputItem) -> OutputItem:
    """Return an item of the conversation: without log-probabilities."""
    if not isinstance(item, MessageItem):
        return item
    return msgspec.structs.replace(item, content=[OutputText(text=part.text) for part in item.content])


def _decoded(turns: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for turn in turns for item in msgspec.json.decode(turn)]

"""Serve OpenAI's Responses by way of chat completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.sse import EventStream
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.responses.answer import ResponseAnswer
from jaxllm.server.responses.event_log import EventLog, LogRoom
from jaxllm.server.responses.input import messages_of, read_input
from jaxllm.server.responses.items import ItemList, Page, list_items
from jaxllm.server.responses.objects import DeletedResponse, MessageItem, OutputItem, OutputText, Response
from jaxllm.server.responses.request import ReasoningOptions, ResponsesRequest, TextFormat, TextOptions
from jaxllm.server.responses.store import ResponseStore, StoredResponse, size_of
from jaxllm.server.responses.stream import Event
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


_UNSTORED = "responses are stored only by a server with one front end (api_server_count=1)."


class _Background(NamedTuple):
    """A running response."""

    answer: ResponseAnswer
    task: asyncio.Task[None]
    log: EventLog | None
    """Its events, if it was asked for as a stream."""
    input: tuple[bytes, ...]
    """The items that it answers, as lists in JSON."""


class OpenAIServingResponses:
    """Answers Responses, and owns the stored ones."""

    def __init__(self, chat: OpenAIServingChat, counted: Callable[[], AbstractContextManager[None]]) -> None:
        """Answer by way of `chat`; `counted` counts a background response as load."""
        self.store = ResponseStore()
        self._chat, self._counted = chat, counted
        self._background: dict[str, _Background] = {}
        """By id; the engine limits their number."""
        self._room = LogRoom()
        self._stores = True

    def stop_storing(self) -> None:
        """Store nothing: another front end of the engine may get the next request of a conversation."""
        self._stores = False

    async def answer(self, request: ResponsesRequest, caller: Caller) -> EventStream | Response:
        """Answer a request; a stream is returned once it is admitted.

        Raises exceptions that `error_response` handles.
        """
        check_generates(self._chat.engine_client, "Responses")
        self._chat.models.check(request.model)
        if not self._stores:
            _check_unstored(request)
            request = msgspec.structs.replace(request, store=False)
        request.check()
        self._chat.check_top_logprobs(request.top_logprobs)
        earlier, items = self._earlier(request), read_input(request.input, self.store.finder())
        asked = (*earlier, msgspec.json.encode(items)) if request.is_stored else ()
        self.store.check_room(asked)
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
                self.store.put(response.id, StoredResponse(body, turns, ids, response.background, log))

        log = EventLog(self._room) if request.background and request.stream else None
        answer = ResponseAnswer(response, turn, self._chat, keep, request.num_logprobs)
        if request.background:
            begun = self._begin(answer, log, asked)
            return begun if log is None else self._stream_of(log, 0)
        if request.stream:
            return EventStream(answer.frames(), turn.outputs, last=b"")
        return await answer.whole()

    def retrieve(self, response_id: str) -> bytes:
        """Return a response in JSON. Raises RequestFailedError, 404, for one that is not stored."""
        self._check_stores()
        running = self._background.get(response_id)
        if running is not None:
            return msgspec.json.encode(running.answer.response())
        return self.store.find(response_id, "response_id").body

    def follow(self, response_id: str, number: int) -> EventStream:
        """Return the events of a response from a sequence number on, those to come too.

        Raises RequestFailedError, 404, for one that is not stored, and VLLMValidationError for one that was not
        created as a stream in the background, or events that are not kept any more.
        """
        self._check_stores()
        running = self._background.get(response_id)
        log = running.log if running is not None else self.store.find(response_id, "response_id").log
        if log is None:
            message = "stream: only a response that was created with background=true and stream=true can be streamed."
            raise VLLMValidationError(message, parameter="stream")
        log.check_kept(number)
        return self._stream_of(log, number)

    async def input_items(self, response_id: str, page: Page) -> ItemList:
        """Return a page of the items that a response answers, those of earlier responses included.

        Raises RequestFailedError, 404, for one that is not stored, and VLLMValidationError for a bad page.
        """
        self._check_stores()
        running = self._background.get(response_id)
        kept = None if running is not None else self.store.find(response_id, "response_id")
        turns = running.input if running is not None else kept.turns if kept is not None else ()
        num_output = 0 if kept is None else len(kept.item_ids)
        return await threaded_if_long(size_of(turns), list_items, turns, num_output, response_id, page)

    async def cancel(self, response_id: str) -> bytes:
        """Cancel a background response, and return it; one that has ended is unchanged.

        Raises RequestFailedError, 404, for one that is not stored, and VLLMValidationError for a foreground one.
        """
        self._check_stores()
        running = self._background.get(response_id)
        if running is not None:
            running.task.cancel()
            await asyncio.wait((running.task,))
        kept = self.store.find(response_id, "response_id")
        if not kept.background:
            message = "response_id: only a response in the background can be cancelled."
            raise VLLMValidationError(message, parameter="response_id")
        return kept.body

    async def delete(self, response_id: str) -> DeletedResponse:
        """Delete a response, and end it first if it runs. Raises RequestFailedError, 404, for an unknown one."""
        self._check_stores()
        if response_id in self._background:
            await self.cancel(response_id)
        self.store.find(response_id, "response_id")
        self.store.discard(response_id)
        return DeletedResponse(id=response_id)

    def _check_stores(self) -> None:
        if not self._stores:
            raise VLLMValidationError(_UNSTORED, parameter="response_id")

    def _earlier(self, request: ResponsesRequest) -> tuple[bytes, ...]:
        """Return the conversation that a request continues."""
        previous = request.previous_response_id
        if previous is None:
            return ()
        if previous in self._background:
            message = "previous_response_id: that response is still being made: wait for its end."
            raise VLLMValidationError(message, parameter="previous_response_id", value=previous)
        return self.store.find(previous, "previous_response_id").turns

    def _begin(self, answer: ResponseAnswer, log: EventLog | None, asked: tuple[bytes, ...]) -> Response:
        """Start a response to the items `asked` in the background, with its events in `log`, and return it."""
        response = answer.response()

        def tell(events: list[Event]) -> None:
            if log is not None:
                log.add(events)

        async def run() -> None:
            try:
                with self._counted():
                    await answer.run(tell)
            finally:
                del self._background[response.id]
                if log is not None:
                    log.end()

        tell(answer.queue())
        self._background[response.id] = _Background(answer, asyncio.create_task(run()), log, asked)
        return response

    def _stream_of(self, log: EventLog, number: int) -> EventStream:
        """Return the stream of a log from a sequence number on. The response goes on when the stream is closed."""
        return EventStream(log.follow(number, self._chat.args.sse_ping_interval), last=b"")

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


def _check_unstored(request: ResponsesRequest) -> None:
    """Raise VLLMValidationError for a request that needs stored responses."""
    for name in ("store", "background", "previous_response_id"):
        if getattr(request, name):
            raise VLLMValidationError(f"{name}: {_UNSTORED}", parameter=name)


def _plain(item: OutputItem) -> OutputItem:
    """Return an item of the conversation: without log-probabilities."""
    if not isinstance(item, MessageItem):
        return item
    return msgspec.structs.replace(item, content=[OutputText(text=part.text) for part in item.content])


def _decoded(turns: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for turn in turns for item in msgspec.json.decode(turn)]

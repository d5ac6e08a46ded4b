"""The events of a response, and the response that they add up to, of pieces that are given."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from jaxllm.exceptions import EngineGenerateError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from jaxllm.server.http.sse import comment
from jaxllm.server.openai.turns import AnswerReader, Turn
from jaxllm.server.responses.answer import ResponseAnswer
from jaxllm.server.responses.events import ResponseBuilder, frame
from jaxllm.server.responses.objects import InputTokensDetails, OutputTokensDetails, Response, ResponseUsage
from jaxllm.server.responses.request import ReasoningOptions, TextOptions
from jaxllm.server.responses.stream import Event, ResponseFailed
from tests.server.response_support import events_of, without_ids
from tests.server.support import Answer
from tests.server.tool_support import ARGUMENTS


def pieces(text: str) -> list[Piece]:
    """Return an answer of all kinds of pieces, one of them for each character."""
    parts: list[Piece] = []
    for character in text:
        parts += [Reasoning(character)]
    parts += [Text("\n"), Text("\n"), *map(Text, text), CallStart(0, "f", "call_1")]
    parts += [CallArguments(0, character) for character in ARGUMENTS]
    parts += [Text(" "), CallStart(1, "g", "call_2"), CallArguments(1, "{}")]
    return parts


def builder() -> ResponseBuilder:
    names = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
    names = (*names, "prompt_cache_retention", "safety_identifier", "user")
    options: dict[str, Any] = {"reasoning": ReasoningOptions(), "text": TextOptions(), "tools": [], "metadata": {}}
    options |= {"temperature": 1.0, "top_p": 1.0, "truncation": "disabled", "tool_choice": "auto", "store": True}
    options |= {
        "parallel_tool_calls": True,
        "service_tier": "default",
        "model": "m",
        "background": False,
        "top_logprobs": 0,
    }
    nothing = dict.fromkeys(names)
    return ResponseBuilder(Response(id="resp_1", created_at=1, status="queued", **nothing, **options))


USAGE = ResponseUsage(
    input_tokens=1,
    input_tokens_details=InputTokensDetails(0),
    output_tokens=2,
    output_tokens_details=OutputTokensDetails(1),
    total_tokens=3,
)


def test_events_are_in_order_and_make_up_the_response() -> None:
    made = builder()
    events = made.begin()
    for piece in pieces("hm, so"):
        events += made.add([piece])
    events += made.end("tool_calls", USAGE, 2)
    told = events_of(Answer(200, {}, b"".join(map(frame, events))))
    kinds = [kind.removeprefix("response.") for kind, _ in itertools.groupby(event["type"] for event in told)]
    text, part = ["output_text.delta", "output_text.done"], ["content_part.added", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    thought = [each.replace("output", "reasoning") for each in text]
    contents = [["output_item.added", part[0], *each, part[1], "output_item.done"] for each in (thought, text)]
    assert kinds == ["created", "in_progress", *contents[0], *contents[1], *call, *call, "completed"]
    whole = told[-1]["response"]
    assert whole["status"] == "completed"
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in whole["output"]] == ["completed"] * 4
    for event in told[2:-1]:
        item = whole["output"][event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        if event["type"].endswith("item.done"):
            assert event["item"] == item
    at_once = builder()
    at_once.add(pieces("hm, so"))
    at_once.end("tool_calls", USAGE, 2)
    assert without_ids(msgspec.to_builtins(at_once.response())) == without_ids(whole)


def test_an_answer_of_white_space_is_a_message_and_one_cut_short_is_incomplete() -> None:
    blank = builder()
    blank.add([Text(" "), Text("\n")])
    blank.end("stop", USAGE, 2)
    assert [item.content[0].text for item in blank.response().output] == [" \n"]  # type: ignore[union-attr]
    short = builder()
    short.add([Reasoning("hm"), CallStart(0, "f", "c"), CallArguments(0, '{"a')])
    short.end("length", USAGE, 2)
    response = short.response()
    assert (response.status, [item.status for item in response.output]) == ("incomplete", ["completed", "incomplete"])
    assert response.incomplete_details is not None
    assert response.completed_at is None


class Broken:
    """Outputs of an engine that cannot go on after the first."""

    async def pings(self, seconds: float) -> AsyncIterator[bytes]:
        assert seconds == 1.0
        yield comment("prefill 1/2")

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        yield RequestOutput("r", "a", [5], None, [CompletionOutput(0, "some", [6], None, None)], finished=False)
        raise EngineGenerateError("/srv/secret.py")

    def relay(self, frames: Callable[[str], bytes]) -> None:
        """There is no direct way."""
        del frames

    def take_relayed(self) -> int:
        """Return that nothing went another way."""
        return 0

    async def aclose(self) -> None:
        """There is nothing to end."""


def broken_answer(kept: list[Response]) -> ResponseAnswer:
    chat: Any = SimpleNamespace(args=SimpleNamespace(sse_ping_interval=1.0, enable_prompt_tokens_details=False))
    outputs: Any = Broken()
    return ResponseAnswer(builder().response(), Turn(outputs, AnswerReader()), chat, kept.append)


def test_an_answer_that_fails_ends_in_an_event_and_is_kept_as_failed() -> None:
    async def read(answer: ResponseAnswer) -> bytes:
        return b"".join([each async for each in answer.frames()])

    kept: list[Response] = []
    told = events_of(Answer(200, {}, asyncio.run(read(broken_answer(kept)))))
    kinds = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "failed"]
    assert [event["type"] for event in told] == [f"response.{kind}" for kind in kinds]
    assert told[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in told[-1]["response"]["error"]["message"]
    background: list[Event] = []
    asyncio.run(broken_answer(kept).run(background.extend))
    assert [(each.status, each.output[0].status) for each in kept] == [("failed", "incomplete")] * 2
    assert isinstance(background[-1], ResponseFailed)

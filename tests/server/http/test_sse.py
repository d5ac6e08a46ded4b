"""Frames of events, and how streams of them end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from jaxllm.engine.online.request_stream import RequestOutputCollector
from jaxllm.exceptions import EngineGenerateError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.server.http.sse import DONE, EngineOutputs, EventStream, TextFrame, comment, event


class Engine:
    """This notes what was aborted."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    async def prefill_progress(self, request_id: str) -> tuple[int, int]:
        """Say that a third is done."""
        del request_id
        return 1, 3

    async def abort(self, request_id: str) -> None:
        """Note a request."""
        self.aborted.append(request_id)


def stream_of(engine: Engine) -> tuple[RequestOutputCollector, EngineOutputs]:
    stream = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    return stream, EngineOutputs(engine, stream)  # type: ignore[arg-type]


def delta(text: str, finish_reason: str | None = None) -> RequestOutput:
    output = CompletionOutput(0, text, [1], None, None, None, finish_reason)
    return RequestOutput("r", None, [1], None, [output], finish_reason is not None)


async def texts(outputs: EngineOutputs) -> AsyncGenerator[bytes, None]:
    async for output in outputs:
        yield event(output.outputs[0].text)


@pytest.mark.parametrize("text", ["", "a", '"\\\n\r\u2028\x00', "é😀</script>", "data: x\n\n"])
def test_a_spliced_frame_is_the_encoded_one(text: str) -> None:
    frame = TextFrame.of(lambda piece: {"a": [{"text": piece}], "b": None})
    assert frame.event(text) == event({"a": [{"text": text}], "b": None})
    assert frame.event(text).count(b"\n") == 2
    assert msgspec.json.decode(frame.event(text)[6:])["a"][0]["text"] == text


def test_comments_are_no_events() -> None:
    assert comment("prefill 1/2") == b": prefill 1/2\n\n"


def test_a_whole_stream_ends_in_done_and_aborts_nothing() -> None:
    async def run() -> list[bytes]:
        stream, outputs = stream_of(engine)
        stream.put(delta("a"))
        stream.put(delta("b", "stop"))
        events = EventStream(texts(outputs), outputs)
        frames = [frame async for frame in events]
        await events.aclose()
        return frames

    engine = Engine()
    assert asyncio.run(run()) == [event("ab"), DONE]  # what nobody has read is merged
    assert engine.aborted == []


@pytest.mark.parametrize("num_read", [0, 1])
def test_closing_ends_the_request_even_if_nothing_was_read(num_read: int) -> None:
    async def run() -> None:
        stream, outputs = stream_of(engine)
        stream.put(delta("a"))
        events = EventStream(texts(outputs), outputs)
        for _ in range(num_read):
            await anext(events)
        await events.aclose()
        await events.aclose()

    engine = Engine()
    asyncio.run(run())
    assert engine.aborted == ["r"]


@pytest.mark.parametrize("way", ["raised", "finish_reason"])
def test_an_error_on_the_way_is_an_event_and_no_done_follows(way: str) -> None:
    async def run() -> list[bytes]:
        stream, outputs = stream_of(Engine())
        stream.put(delta("a"))
        events = EventStream(texts(outputs), outputs)
        frames = [await anext(events)]
        stream.put(EngineGenerateError("/secret/path") if way == "raised" else delta("", "error"))
        return frames + [frame async for frame in events]

    first, last = asyncio.run(run())
    assert first == event("a")
    error = msgspec.json.decode(last[6:])["error"]
    assert error["code"] == 500
    assert error["type"] == "InternalServerError"
    assert "secret" not in error["message"]


def test_pings_come_until_the_first_output() -> None:
    async def run() -> list[bytes]:
        stream, outputs = stream_of(Engine())
        pings = []
        async for ping in outputs.pings(0.01):
            pings.append(ping)
            if len(pings) == 3:
                stream.put(delta("a", "stop"))
                break
        return pings + [frame async for frame in texts(outputs)]

    *pings, text = asyncio.run(run())
    assert pings == [comment("prefill 1/3")] * 3
    assert text == event("a")


def test_an_output_that_comes_while_a_ping_is_made_takes_its_place() -> None:
    async def run() -> list[bytes]:
        engine = Engine()
        stream, outputs = stream_of(engine)

        async def put(_request_id: str) -> tuple[int, int]:
            stream.put(delta("a", "stop"))
            return 1, 3

        engine.prefill_progress = put  # type: ignore[method-assign]
        return [*[ping async for ping in outputs.pings(0.01)], *[frame async for frame in texts(outputs)]]

    assert asyncio.run(run()) == [event("a")]


def test_without_an_interval_nothing_is_waited_for() -> None:
    async def run() -> list[bytes]:
        return [ping async for ping in stream_of(Engine())[1].pings(0)]

    assert asyncio.run(run()) == []


def test_closing_while_pings_wait_ends_the_request() -> None:
    async def run() -> None:
        _, outputs = stream_of(engine)
        await anext(outputs.pings(0.01))
        await outputs.aclose()

    engine = Engine()
    asyncio.run(run())
    assert engine.aborted == ["r"]

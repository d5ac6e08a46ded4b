"""Plain text goes straight from a step to its connection: the same bytes, without the tasks that send other answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest
from fastapi import FastAPI

from jaxllm.engine.online.request_stream import RequestOutputCollector, TextOutbox
from jaxllm.server.http.connection import ChunkRelay
from tests.server.support import Served, mock_served

_SHOWN = re.compile(rb'"(?:type":"text_delta","text|delta|response|content)":"(?:[^"\\]|\\.)*"')
MESSAGES = [{"role": "user", "content": "a"}]
COMPLETION = ("/v1/completions", {"prompt": [5]})
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
COMMON = {"max_tokens": 40, "seed": 300, "ignore_eos": True, "stream": True}
_VARYING = re.compile(rb'"(id|created)":("[^"]*"|\d+),')
_TEXT = re.compile(rb'"(text|content)":"((?:[^"\\]|\\.)*)"')


class Writes:
    """Counts the texts that go straight to a connection, and can keep the way shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = self.num_asked = 0
        self.is_open: Callable[[int], bool] = lambda _num_asked: True
        write, text_writer = ChunkRelay.write, RequestOutputCollector.text_writer

        def count(relay: ChunkRelay, text: str, num_tokens: int) -> None:
            self.num += 1
            write(relay, text, num_tokens)

        def ask(stream: RequestOutputCollector) -> Callable[[str, int], None] | None:
            self.num_asked += 1
            return text_writer(stream) if self.is_open(self.num_asked) else None

        monkeypatch.setattr(ChunkRelay, "write", count)
        monkeypatch.setattr(RequestOutputCollector, "text_writer", ask)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    with mock_served(tokenizer, tokens_per_second=2000) as server:
        yield server


def shown(server: Served, path: str, body: dict[str, Any]) -> tuple[str, list[bytes]]:
    """Return an answer's text and its frames without it: a busy reader gets several texts in one frame."""
    answer = server.post(path, {**COMMON, **body})
    assert answer.status == 200, answer.body
    frames = _TEXT.sub(rb'"text":""', _VARYING.sub(b"", answer.body)).split(b"\n\n")
    return b"".join(text for _, text in _TEXT.findall(answer.body)).decode(), [frame for frame, _ in groupby(frames)]


USAGE = {"include_usage": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        COMPLETION,
        CHAT,
        (CHAT[0], {**CHAT[1], "stream_options": USAGE}),
        (COMPLETION[0], {**COMPLETION[1], "stream_options": USAGE, "echo": True}),
    ],
)
def test_the_way_changes_nothing(server: Served, writes: Writes, path: str, body: dict[str, Any]) -> None:
    direct = shown(server, path, body)
    assert len(direct[0]) > 20
    assert writes.num > 15
    for share in (1, 2, 5):  # shut, then open now and then
        writes.num, writes.is_open = 0, lambda num_asked, share=share: num_asked % share > 0
        assert shown(server, path, body) == direct
        assert (writes.num > 5) == (share > 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "model": "tiny", "max_tokens": 40}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 40}),
        ("/api/generate", {"prompt": "a", "model": "tiny", "options": {"num_predict": 40}}),
        ("/api/chat", {"messages": MESSAGES, "model": "tiny", "options": {"num_predict": 40}}),
    ],
)
def test_the_other_dialects_have_the_same_way(server: Served, writes: Writes, path: str, body: dict[str, Any]) -> None:
    def answer() -> tuple[int, int]:
        """Return the number of pieces of the text, which no seed fixes, and that of the tokens."""
        answer = server.post(path, {**body, "stream": True})
        assert answer.status == 200, answer.body
        counts = re.findall(rb'"(?:output_tokens|eval_count)":(\d+)', answer.body)
        return len(_SHOWN.findall(answer.body)), int(counts[-1])

    num_frames, num_tokens = answer()
    assert writes.num > 15
    assert num_frames > 15
    assert num_tokens == 40
    writes.num, writes.is_open = 0, lambda _num_asked: False
    assert answer()[1] == 40
    assert writes.num == 0


@pytest.mark.parametrize(
    "body",
    [
        {"n": 3},
        {"prompt": [[5], [6]]},
        {"logprobs": 1},
        {"return_token_ids": True},
        {"stop": ["never"]},
        {"stream_options": {**USAGE, "continuous_usage_stats": True}},
    ],
)
def test_all_but_one_plain_text_is_sent_by_the_task(server: Served, writes: Writes, body: dict[str, Any]) -> None:
    """Several texts of a step become one write; what else is asked for comes with outputs."""
    whole, _ = shown(server, *COMPLETION)
    writes.num = 0
    text, _ = shown(server, COMPLETION[0], {**COMPLETION[1], **body})
    assert writes.num == 0
    assert text == whole or len(text) > len(whole)


class Reader:
    """Middleware of a user's own, which sees all that is sent."""

    seen = 0

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Count the bytes."""

        async def look(message: Any) -> None:
            Reader.seen += len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, look)


def test_middleware_of_users_sees_everything(tokenizer: str, writes: Writes) -> None:
    with mock_served(tokenizer, "--middleware", f"{__name__}.Reader") as server:
        Reader.seen = 0
        answer = server.post(COMPLETION[0], {**COMPLETION[1], **COMMON})
    assert (writes.num, Reader.seen) == (0, len(answer.body))


def mounted(app: FastAPI) -> FastAPI:
    """Return another application that has middleware, and this one below all of its paths."""
    outer = FastAPI(openapi_url=None)
    outer.add_middleware(Reader)
    outer.mount("/", app)
    return outer


@pytest.mark.parametrize("around", [Reader, mounted])
def test_an_application_around_this_one_sees_everything(tokenizer: str, writes: Writes, around: Any) -> None:
    with mock_served(tokenizer, around=around) as server:
        Reader.seen = 0
        answer = server.post(COMPLETION[0], {**COMPLETION[1], **COMMON})
    assert (writes.num, Reader.seen) == (0, len(answer.body))


def test_a_failure_on_the_way_ends_its_request_alone(
    server: Served, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = ChunkRelay.write, 0

    def fail(relay: ChunkRelay, text: str, num_tokens: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ArithmeticError("no number")
        write(relay, text, num_tokens)

    whole = shown(server, *COMPLETION)
    monkeypatch.setattr(ChunkRelay, "write", fail)
    answer = server.post(COMPLETION[0], {**COMPLETION[1], **COMMON})
    assert b'"code":500' in answer.body
    assert shown(server, *COMPLETION) == whole


def test_texts_of_one_turn_are_one_chunk_with_a_frame_each() -> None:
    written: list[bytes] = []
    relay = ChunkRelay(written.append, is_open=True)
    relay.outbox = outbox = TextOutbox()
    relay.write("a", 1)
    assert written.pop() == b"1\r\na\r\n"
    outbox.holds, relay.num_tokens = True, 0
    relay.frames = lambda text: b"" if text == "-" else b"<%b>" % text.encode()
    for text in ("a", "", "-", "\N{GREEK SMALL LETTER BETA}b"):
        relay.write(text, 2)
    assert (outbox.relays, written, relay.num_tokens) == ([relay], [], 8)
    outbox.flush()
    relay.write("c" * 300, 1)
    outbox.flush()
    outbox.flush()
    assert written == ["8\r\n<a><\N{GREEK SMALL LETTER BETA}b>\r\n".encode(), b"12e\r\n<%b>\r\n" % (b"c" * 300)]

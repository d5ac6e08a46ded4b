"""scripts/check.py soak: some seconds find nothing wrong at a tiny model's server, and planted faults are found."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from check.soak import DEV_MODE
from check.soaking.answers import Said
from check.soaking.census import Census, trend
from check.soaking.pictures import make_picture_asks
from check.soaking.report import report, show
from check.soaking.requests import Lengths, make_asks
from check.soaking.server_soak import ServerSoak
from lib.front_end import serve_command
from lib.servers import server_process

from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder
from tests.server.support import TEMPLATE

pytestmark = pytest.mark.server

FLAGS = (
    *("--dtype", "bfloat16", "--batch-invariant", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "64", "--cudagraph-capture-sizes", "64", "--block-size", "16"),
    *("--num-gpu-blocks-override", "17", "--max-logprobs", "5", "--shutdown-timeout", "30"),
    *("--chat-template", TEMPLATE),
)
LENGTHS = Lengths(words=4, long_words=20, max_tokens=16)


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSoak]:
    """Return a soak that has ended."""
    path = tmp_path_factory.mktemp("soak")
    command = serve_command(folder("qwen3"), "--tokenizer", save_tokenizer(path), *FLAGS)
    with server_process(command, path / "log.txt", env=os.environ | DEV_MODE) as server:
        source = random.Random(1)
        soak = ServerSoak(server, source, make_asks(source, 20, LENGTHS), compiles_ahead=False)
        asyncio.run(soak.run(2.0, 2.0))
        yield soak


def test_mixed_load_leaves_and_mixes_nothing(soak: ServerSoak, capsys: pytest.CaptureFixture[str]) -> None:
    record = report(soak, 2.0)
    assert (record["violations"], record["not_free_at_rest"]) == ([], [])
    missed = {goal for goal, reached in record["goals_reached"].items() if reached is False}
    assert missed <= {"requests were preempted"}  # not certain in some seconds
    assert soak.end == {"exit_status": 0, "streams_drained": 4, "streams": 4, "processes_left": 0}
    assert {"whole: equal", "stream: equal", "bad: refused"} <= soak.outcomes.keys()
    show(record | {"seconds": 2.0})
    assert "  requests were preempted" in capsys.readouterr().out


def test_what_misses_a_goal_is_said_to(soak: ServerSoak) -> None:
    def missed(name: str, value: Any) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(soak, "num_preemptions", 1)
            patch.setattr(soak, name, value)
            return [goal for goal, reached in report(soak, 1800.0)["goals_reached"].items() if reached is False]

    assert missed("violations", ["mixed"]) == ["no errors, and every answer as it was alone"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "compiles_ahead", True)
        assert missed("num_compiled", [7, 7, 8]) == ["no program compiled after warm-up"]
    assert missed("left", ["blocks"]) == ["nothing runs or waits at rest, and all KV blocks and encoded items are free"]
    assert missed("num_preemptions", 0) == ["requests were preempted"]
    assert len(missed("end", soak.end | {"exit_status": 1})) == 1

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("num_others", 30), ("num_moved", 16), ("num_renamed", 90), ("num_processed", 90)):
            patch.setattr(soak, name, value)
        assert missed("num_moved", 16) == []
        assert missed("num_moved", 15) == ["most answers change when nothing but the pixels does"]
        assert missed("num_processed", 89) == ["as many items were processed as were renamed"]
        assert missed("num_renamed", 0) == ["as many items were processed as were renamed"]

    def front(mib: float, fds: int) -> Any:
        return lambda name: [Census(i / 2, 100.0 + i * mib, 5, 10 + (fds if i > 50 else 0)) for i in range(100)]

    assert missed("rests", front(0.0, 0)) == []
    assert missed("rests", front(0.0, 1)) == [f"fds of the {name} constant at rest" for name in ("front", "core")]
    assert [goal.partition(" in ")[0] for goal in missed("rests", front(0.2, 0)) if " times " in goal] == [
        f"memory of the {name}" for name in ("front", "core")
    ]
    assert [goal.partition(" by ")[0] for goal in missed("rests", front(0.01, 0))] == [
        f"memory of the {name} grows" for name in ("front", "core")
    ]


def test_the_error_of_a_slope_is_that_of_the_noise() -> None:
    held = [Census(i / 4, 100.0 + i / 4 + (-1) ** (i // 10), 5, 10) for i in range(120)]  # stretches of ten up and down
    assert trend(held).slope == pytest.approx(1.0, abs=0.03)
    assert trend(held).error == pytest.approx(0.035, rel=0.2)
    assert trend(held[:1]) == (0.0, None)


def test_pieces_of_a_stream_make_the_whole() -> None:
    whole, streamed = Said(), Said()
    rows = {"tokens": ["a", "b"], "text_offset": [0, 1], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{}, {}]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    whole.add({"choices": [{"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": rows}], "usage": usage})
    for i, text in enumerate("ab"):
        assert streamed.is_beginning_of(whole)
        piece = {name: values[i : i + 1] for name, values in rows.items()}
        streamed.add(
            {"choices": [{"index": 0, "text": text, "finish_reason": "stop" if i else None, "logprobs": piece}]}
        )
    streamed.add({"choices": [], "usage": usage})
    assert streamed == whole
    streamed.texts[0] = "ax"
    assert not streamed.is_beginning_of(whole)


def test_a_request_that_shares_nothing_differs_in_names_alone() -> None:
    source = random.Random(0)
    asks = make_picture_asks(source, 8, LENGTHS)
    assert {part["type"] for ask in asks for part in ask.body["messages"][0]["content"]} == {
        "text",
        "image_url",
        "video_url",
    }
    for ask in asks:
        [*messages] = ask.unshared(source)["messages"]
        named = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        names = [part.pop("uuid") for part in named if part["type"] != "text"]
        assert len(set(names)) == len(names) >= 1
        assert messages == ask.body["messages"]
        assert len(names) == ask.num_items


def test_requests_about_other_items_differ_in_pixels_alone() -> None:
    def without_urls(body: dict[str, Any]) -> str:
        return re.sub("base64,[^']*", "", str(body))

    first, second = (make_picture_asks(random.Random(0), 8, LENGTHS, drawing=drawing) for drawing in (0, 1))
    for ask, other in zip(first, second, strict=True):
        assert ask.body != other.body
        assert without_urls(ask.body) == without_urls(other.body)

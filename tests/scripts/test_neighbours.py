"""scripts/check.py neighbours: which times between tokens count, what is judged, and that a failure is one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from check import neighbours
from check.neighbours import Answered, Turn, report
from lib.servers import ServerError, Streamed

pytestmark = pytest.mark.scripts


def make_turn(touched: float, *, num: int = 2, num_tokens: int = 100) -> Turn:
    """Return a turn of a stream whose tokens come every 10 ms; the gaps beside a request, at 1 s and so on, differ."""
    times, requests = [0.0], []
    for index in range(num):
        times += [index + 0.01 * step for step in range(1, 90)]
        requests.append(Answered(times[-1] + 0.001, times[-1] + touched - 0.001, num_tokens))
        times.append(times[-1] + touched)
    return Turn(requests, [times])


PLAIN = Turn([], [[0.01 * step for step in range(300)]])


def test_only_gaps_beside_a_request_count() -> None:
    assert make_turn(0.05).gaps() == pytest.approx([0.05, 0.05])
    assert len(PLAIN.gaps()) == 299
    late = Turn([Answered(5.0, 6.0, 100)], PLAIN.reached)
    assert (late.gaps(), late.num_felt(), make_turn(0.05).num_felt()) == ([], 0, 2)
    across = Turn([Answered(0.015, 0.035, 100)], [*PLAIN.reached, *PLAIN.reached])
    assert len(across.gaps()) == 6


def test_ratios_and_goals() -> None:
    record = report({"text": [make_turn(0.05)] * 3, "pictures": [make_turn(0.06)] * 3, "nothing": [PLAIN]})
    assert record["itl_ms_text"] == {"p50": 50.0, "p90": 50.0, "p99": 50.0, "mean": 50.0, "gaps": 6}
    assert (record["pictures_by_text"], record["pictures_by_nothing"], record["text_by_nothing"]) == (1.2, 6.0, 5.0)
    assert record["beside_text"] == {"requests": 6, "prompt_tokens": 600, "felt": 6}
    assert list(record["goals_reached"].values()) == [False, True, True]


@pytest.mark.parametrize(
    ("text", "pictures", "reached"),
    [
        (make_turn(0.05), make_turn(0.054), [True, True, True]),
        (make_turn(0.012), make_turn(0.012), [True, False, True]),
        (make_turn(0.05), make_turn(0.05, num=3), [True, True, False]),
        (make_turn(0.05), make_turn(0.05, num_tokens=99), [True, True, False]),
    ],
)
def test_what_misses_a_goal(text: Turn, pictures: Turn, reached: list[bool]) -> None:
    record = report({"text": [text], "pictures": [pictures], "nothing": [PLAIN]})
    assert list(record["goals_reached"].values()) == reached


def test_both_kinds_come_at_the_same_times_with_as_many_tokens() -> None:
    rows = {224: 66, 280: 102, 336: 146}
    text, pictures = (neighbours._requests(kind, 30, rows, random.Random(3)) for kind in ("text", "pictures"))
    assert [start for start, *_ in text] == [start for start, *_ in pictures]
    for (_, _, body), (_, _, chat) in zip(text, pictures, strict=True):
        *items, _ = chat["messages"][0]["content"]
        assert len(body["prompt"]) == 30 + sum(rows[int(item["uuid"].split()[2])] for item in items)
    assert neighbours._requests("nothing", 30, rows, random.Random(3)) == []


def test_a_request_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream(port: int, body: Any) -> Streamed:
        return Streamed(0.0, reached=[0.01 * step for step in range(100)])

    async def fail(port: int, body: Any, path: str) -> Any:
        raise ServerError("500: no picture")

    monkeypatch.setattr(neighbours, "stream", stream)
    monkeypatch.setattr(neighbours, "ask", fail)
    with pytest.raises(ServerError, match="no picture"):
        asyncio.run(neighbours._turn(1, [(0.0, "/v1/chat/completions", {})]))

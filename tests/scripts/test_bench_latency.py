"""scripts/bench.py latency: which times count, and the medians."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bench import latency
from lib.servers import Streamed
from peers.prompts import Source

pytestmark = pytest.mark.scripts


def test_gaps_count_of_streams_alone_and_while_the_long_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams' tokens come every 0.1 s, and beside the long prompt every 0.3 s, from 2 to 5 s.

    One stream's first token comes late: until then others read their prompts, and their gaps do not count.
    """
    alone = [0.1 * i for i in range(1, 41)]
    late = [0.1, 1.0, *alone[10:]]
    beside = [0.1 * i for i in range(1, 21)] + [2 + 0.3 * i for i in range(1, 11)] + [5 + 0.1 * i for i in range(1, 10)]
    answers = iter([late, alone, alone[9:], alone, *[beside] * 4])

    async def ask(server: Any, prompt: list[int], num_tokens: int) -> Streamed:
        began = {600: 2.0, latency.IDLE_PROMPT: 2.5}.get(len(prompt), 0.0)
        ends = {600: 5.0, latency.IDLE_PROMPT: 3.0}.get(len(prompt))
        return Streamed(began, reached=next(answers) if ends is None else [ends])

    async def rest(seconds: float) -> None:
        del seconds

    monkeypatch.setattr(latency, "_ask", ask)
    monkeypatch.setattr(latency.asyncio, "sleep", rest)
    sample = asyncio.run(latency._beside(None, Source(1000), True))  # pyright: ignore[reportArgumentType]
    assert sample["itl_ms_alone_p99"] == pytest.approx(100)
    assert sample["itl_ms_meanwhile_p50"] == pytest.approx(300)
    assert sample["itl_p99_meanwhile_by_alone"] == pytest.approx(3)
    assert (sample["long_ttft_ms"], sample["short_ttft_ms"]) == pytest.approx((3000, 500))


def test_ratios_are_those_of_the_same_round() -> None:
    samples = {"jaxllm": [{"x": 1.0}, {"x": 8.0}, {"x": 3.0}], "vllm": [{"x": 2.0}, {"x": 8.0}, {"x": 1.0}]}
    row = latency._medians(samples)
    assert row == {"jaxllm": {"x": 3.0}, "vllm": {"x": 2.0}, "jaxllm_by_vllm": {"x": 1.0}}

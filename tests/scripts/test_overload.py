"""scripts/check.py overload: every request is served or refused, and missed goals are reported."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from check.overload import Plan, measure, show, verdicts
from lib.front_end import mock_server

from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder

pytestmark = pytest.mark.scripts

PLAN = Plan(4, 8, capacity_seconds=1.0, seconds=2.0, prompt_words=(2, 4), max_tokens=(4, 12))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a server without a model does under load."""
    path = tmp_path_factory.mktemp("overload")
    flags = ("--tokenizer", save_tokenizer(path), "--tokens-per-second", "50", "--max-model-len", "64")
    with mock_server(folder("llama3_tied"), path / "log.txt", *flags, *PLAN.flags()) as server:
        return asyncio.run(measure(server, PLAN))


def test_every_request_is_served_or_refused(figures: dict[str, Any]) -> None:
    over = figures["overload"]
    assert over["accepted"] + over["refused"] == over["offered"]
    assert over["accepted"] > PLAN.max_num_queued_reqs
    assert over["refused"] > over["accepted"]
    assert over["refused_by_the_server's_count"] == over["refusals_with_503_and_retry_after"] == over["refused"]
    assert over["offered_by_served"] >= 4
    assert figures["num_failures"] == 0
    assert over["health"]["statuses"].keys() == {200}
    # A request that waits for a slot waits longer than a running one.
    assert over["ttft_ms"]["p50"] > figures["capacity"]["ttft_ms"]["p50"]


def test_what_misses_a_goal_is_said_to(figures: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    good = copy.deepcopy(figures)
    over = good["overload"]
    over |= {"refusal_ms": {"p99": 49.0}, "itl_p99_by_capacity": 1.49}
    over["resident_mib"] = {"front": {"growth": 4.9}, "core": {"growth": -1.0}}
    assert set(verdicts(good, 120.0).values()) == {True}
    for name, value in (
        ("offered_by_served", 3.9),
        ("refusals_with_503_and_retry_after", over["refused"] - 1),
        ("refused_by_the_server's_count", over["refused"] + 1),
        ("refusal_ms", {"p99": 51.0}),
        ("itl_p99_by_capacity", 1.51),
        ("resident_mib", {"front": {"growth": 5.1}, "core": {"growth": 0.0}}),
        ("health", {"statuses": {200: 9, 503: 1}}),
    ):
        bad = good | {"overload": over | {name: value}}
        assert list(verdicts(bad, 120.0).values()).count(False) == 1, name
    assert False in verdicts(good | {"left_at_rest": {"vllm:num_requests_running": 1.0}}, 120.0).values()
    assert False in verdicts(good | {"num_failures": 1}, 120.0).values()
    show(figures, verdicts(figures, 2.0))
    assert "?    memory grows" in capsys.readouterr().out  # so short a run cannot judge it

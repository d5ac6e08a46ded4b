"""scripts/check.py soak_engine: a few seconds find nothing wrong, and planted faults are found."""

from __future__ import annotations

import asyncio

import pytest
from check.soak_engine import Soak, report
from check.soaking.catalogue import Ended, Output
from check.soaking.census import Census, trend

from tests.e2e.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_random_load_with_a_kill_loses_and_mixes_nothing(tokenizer: str) -> None:
    soak = Soak(1, tokenizer, num_cases=20)
    asyncio.run(soak.run(2.0, phase_seconds=2.0, phases_to_kill=1))
    record = report(soak, 2.0)
    assert record["violations"] == []
    assert record["kills"] >= 1
    assert soak.outcomes["whole: equal"] > 0
    assert any(outcome.endswith(": dead") for outcome in soak.outcomes)


def test_outputs_of_another_request_are_noticed(tokenizer: str) -> None:
    soak = Soak(1, tokenizer, num_cases=20)
    wrong = Ended({0: Output([1, 2, 3], "abc", [], ("length", None))})
    soak._alone = dict.fromkeys(soak._cases, wrong)
    asyncio.run(soak.run(1.0, phase_seconds=1.0, phases_to_kill=1))
    assert soak.outcomes["whole: mixed"] > 0
    assert report(soak, 1.0)["num_violations"] > 0


def test_a_beginning_is_told_from_another_request() -> None:
    whole = Ended({0: Output([1, 2, 3], "abc"), 1: Output([4], "d")})
    assert Ended({0: Output([1, 2], "ab")}).is_beginning_of(whole)
    assert Ended({}).is_beginning_of(whole)
    assert not Ended({1: Output([1], "a")}).is_beginning_of(whole)
    assert not Ended({0: Output([1, 2], "x")}).is_beginning_of(whole)


def test_growth_of_the_front_end_over_a_long_run_is_a_violation(tokenizer: str) -> None:
    soak = Soak(0, tokenizer)
    soak.front = [Census(minute, 100.0 + 2 * minute, 5, 10) for minute in range(20)]
    assert trend(soak.front).slope == pytest.approx(2.0)
    assert "memory" in report(soak, 1200.0)["violations"][0]
    soak.violations, soak.front = [], [Census(minute, 100.0, 5, 10 + minute) for minute in range(20)]
    assert "fds" in report(soak, 1200.0)["violations"][0]

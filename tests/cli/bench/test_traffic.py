"""Requests are sent at the rate that was asked for, as regularly as was asked for."""

from __future__ import annotations

import itertools
import math
import statistics
from random import Random

import pytest

from jaxllm.cli.bench.traffic import Ramp, send_times
from jaxllm.exceptions import VLLMValidationError


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_an_infinite_rate_sends_all_at_once():
    assert send_times(3, math.inf, 1.0, Random(0)) == [0.0] * 3


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_a_rate_takes_its_time_however_bursty(burstiness: float):
    times = send_times(2001, 10.0, burstiness, Random(0))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200.0)
    # A gamma distribution's coefficient of variation is 1 / sqrt(shape).
    pauses = gaps(times)
    assert statistics.pstdev(pauses) / statistics.fmean(pauses) == pytest.approx(burstiness**-0.5, rel=0.2)


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", 10**0.5)])
def test_a_ramp_sends_ever_faster(strategy: str, middle: float):
    ramp = Ramp(strategy, 1.0, 10.0)
    assert (ramp.rate(0), ramp.rate(0.5), ramp.rate(1)) == pytest.approx((1.0, middle, 10.0))
    pauses = gaps(send_times(4001, math.inf, 100.0, Random(0), ramp))
    assert statistics.fmean(pauses[:100]) == pytest.approx(1.0, rel=0.1)
    assert statistics.fmean(pauses[-100:]) == pytest.approx(0.1, rel=0.1)


def test_a_linear_ramp_from_zero_sends():
    times = send_times(10, math.inf, 1.0, Random(0), Ramp("linear", 0.0, 10.0))
    assert all(math.isfinite(each) for each in times)


@pytest.mark.parametrize(
    ("strategy", "start", "end"), [("linear", 5.0, 5.0), ("linear", -1.0, 5.0), ("exponential", 0.0, 5.0)]
)
def test_ramps_that_cannot_be(strategy: str, start: float, end: float):
    with pytest.raises(VLLMValidationError, match="ramp_up_start_rps"):
        Ramp(strategy, start, end)


def test_the_seed_decides():
    assert send_times(5, 1.0, 1.0, Random(1)) == send_times(5, 1.0, 1.0, Random(1))
    assert send_times(5, 1.0, 1.0, Random(1)) != send_times(5, 1.0, 1.0, Random(2))

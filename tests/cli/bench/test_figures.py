"""The figures of scripted requests are those that a reader computes by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.cli.bench.figures import Conditions, Result, count_errors, percentile, report, summarize

PLAIN = Conditions(request_rate=math.inf, burstiness=1.0, max_concurrency=None, percentiles=(50.0, 99.0))
DONE = [
    Result(start=0.0, prompt_len=10, output_len=5, ttft=0.1, itl=[0.1, 0.1, 0.1, 0.1], latency=0.5),
    Result(start=0.2, prompt_len=20, output_len=3, ttft=0.2, itl=[0.3, 0.5], latency=1.0),
    Result(start=2.0, prompt_len=30, output_len=1, ttft=0.3, latency=0.3),
]
FAILED = Result(start=0.0, prompt_len=99, output_len=2, ttft=9.0, latency=9.0, error="500: no")


def test_figures():
    figures = summarize([*DONE, FAILED], 4.0, 0.25, PLAIN)
    expected = {
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 60,
        "total_output_tokens": 9,
        "request_throughput": 0.75,
        "output_throughput": 2.25,
        "total_token_throughput": 17.25,
        "max_concurrent_requests": 2,
        "client_cpu_seconds": 0.25,
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "mean_tpot_ms": (100 + 400) / 2,  # one token has no time per token
        "mean_itl_ms": 200.0,
        "median_itl_ms": 100.0,
        "mean_e2el_ms": 600.0,
        "p99_e2el_ms": 990.0,
        "std_e2el_ms": np.std([500, 1000, 300]),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["request_goodput"] is None


@pytest.mark.parametrize("percent", [0, 12.5, 50, 90, 99, 100])
def test_percentiles_are_numpys(percent: float):
    for values in ([3.0], [1.0, 2.0], [0.5, 1.5, 9.0, 10.0, 11.5]):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_goodput_counts_requests_that_meet_all_goals():
    goals = {"ttft": 250.0, "tpot": 150.0, "e2el": 2000.0}
    figures = summarize(DONE, 2.0, 0.0, Conditions(math.inf, 1.0, None, goodput=goals))
    assert figures["request_goodput"] == 0.5  # the first one only


def test_the_report_has_the_fields_terms():
    conditions = Conditions(2.5, 1.0, 8, percentiles=(99.0, 99.9), metrics=("ttft", "itl"), goodput={"ttft": 1.0})
    lines = list(report(summarize(DONE, 4.0, 0.25, conditions), conditions))
    assert lines[0].strip("=") == " Serving Benchmark Result "
    values = dict(line.rsplit(": ", 1) for line in lines if ": " in line)
    figures = {label: value.strip() for label, value in values.items()}
    assert figures["Successful requests"] == "3"
    assert figures["Maximum request concurrency"] == "8"
    assert figures["Request rate configured (RPS)"] == "2.50"
    assert figures["Total Token throughput (tok/s)"] == "17.25"
    assert figures["Client CPU time (s)"] == "0.25"
    assert figures["Mean TTFT (ms)"] == "200.00"
    assert {"P99 ITL (ms)", "P99.9 ITL (ms)", "Median ITL (ms)", "Request goodput (req/s)"} <= figures.keys()
    assert not any("TPOT" in line or "E2EL" in line for line in lines)


def test_no_request_that_succeeds_is_a_report_too():
    figures = summarize([FAILED], 1.0, 0.0, PLAIN)
    assert (figures["completed"], figures["failed"], figures["mean_ttft_ms"]) == (0, 1, 0.0)
    assert list(report(figures, PLAIN))
    assert count_errors([FAILED, *DONE, FAILED]) == [("500: no", 2)]

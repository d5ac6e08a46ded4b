"""scripts/bench.py seam: every token is counted, both engines do the same work in turns, and goals are judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.seam import __main__ as bench_seam
from bench.seam import engines as seam
from bench.seam.cpu import Run, measure_streams
from lib.servers import cpu_seconds
from peers.worker import Answer, Worker

from tests.models.tiny import folder

pytestmark = pytest.mark.scripts


def test_streams_through_a_process_bring_every_token() -> None:
    runs = [Run(1, 5, rounds=1), Run(4, 5, rounds=2)]
    rows = measure_streams(str(folder("qwen3")), runs, tokens_per_second=100.0, skip_tokenizer_init=True)
    assert [row["streams"] for row in rows] == [1, 4]
    for row in rows:
        assert row["front_cpu_us_per_token"] > 0
        assert 0 < row["delay_ms_p50"] <= row["delay_ms_p99"] <= row["delay_ms_max"]
        assert row["tokens_per_second"] <= 140 * row["streams"]  # the first token comes at once


def test_the_cpu_time_of_another_process_is_its_own() -> None:
    code = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = float(process.stdout.readline())
        assert said <= cpu_seconds(process.pid) < said + 0.2
        process.communicate(b"\n")


class FakeWorker:
    """An engine that takes a second for LLM's work and two for AsyncLLM's; it echoes prompts."""

    def __init__(self, kind: str, order: list[str]) -> None:
        self._kind, self._order = kind, order

    def call(self, method: str, *arguments: Any) -> Answer:
        if method in ("generate", "first_token"):
            self._order.append(self._kind)
        return Answer(
            arguments[0] if method == "generate" else 0.0, {"llm": 1.0, "async": 2.0}[self._kind], 0.0, peak_bytes=0
        )

    def seconds_to(self, answer: Answer) -> float:
        return 5 * answer.seconds

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    order: list[str] = []
    monkeypatch.setattr(seam, "_start", lambda kind, *_: FakeWorker(kind, order))
    return order


def test_throughput_is_compared_in_turns(order: list[str], tmp_path: Path) -> None:
    figures = seam.measure_throughput(tmp_path, rounds=3, num_tokens=8, vocab_size=1000, engine={}, scratch=tmp_path)
    assert order == ["llm", "async", *("llm", "async"), *("async", "llm"), *("llm", "async")]
    assert figures["tokens_per_second"] == {"llm": 64 * 8, "async": 64 * 4}
    assert (figures["ratio"], figures["share_of_outputs_that_are_the_same"]) == (0.5, 1.0)
    assert bench_seam.verdicts("throughput", figures) == {"ratio": False}


def test_starts_are_compared_in_turns(order: list[str], tmp_path: Path) -> None:
    figures = seam.measure_startup(tmp_path, pairs=2, engine={}, scratch=tmp_path)
    assert order[2:] == ["llm", "async", "async", "llm"], "the first two fill the caches"
    assert figures["seconds"] == {"llm": 5.0, "async": 10.0}
    assert figures["more_seconds"] == 5.0
    assert bench_seam.verdicts("startup", figures) == {"more_seconds": False}


def test_both_engines_of_the_worker_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.worker.read_files", lambda *_: None)
    engine = {
        "skip_tokenizer_init": True, "dtype": "float32", "block_size": 16, "enforce_eager": True,
        "num_gpu_blocks_override": 40,
    }  # fmt: skip
    outputs = []
    for kind in seam.KINDS:
        with seam._start(kind, folder("qwen3"), engine, tmp_path) as worker:
            assert isinstance(worker, Worker)
            outputs.append(worker.call("generate", [[5, 6, 7], [8, 9]], 4).value)
            assert worker.call("cpu_seconds").value > 0.1
    assert outputs[0] == outputs[1]
    assert [len(each) for each in outputs[0]] == [4, 4]

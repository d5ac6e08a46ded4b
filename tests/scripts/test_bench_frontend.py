"""scripts/bench.py frontend: every token of a stream is counted, and goals are judged by the worst row."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from bench import frontend as bench_frontend
from lib import front_end
from lib.servers import ServerError, Streamed, ask, descendants, server_process, stream
from peers import servers as peer_servers

from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder

pytestmark = pytest.mark.scripts


def test_streams_of_a_server_without_a_model(tmp_path: Path) -> None:
    flags = ("--tokenizer", save_tokenizer(tmp_path), "--tokens-per-second", "100", "--max-model-len", "64")
    with front_end.mock_server(folder("llama3_tied"), tmp_path / "log.txt", *flags) as server:
        body: dict[str, Any] = {"prompt": [8, 9], "max_tokens": 12, "ignore_eos": True}
        before, began = server.cpu_seconds(), time.monotonic()
        answer = asyncio.run(stream(server.port, body))
        ended = time.monotonic()
        assert answer.num_tokens == 12
        assert 1 <= len(answer.arrivals) <= 12
        assert began <= answer.began <= answer.arrivals[0] <= answer.arrivals[-1] <= answer.ended <= ended
        assert server.cpu_seconds() - before > 0
        slack = 1e-3  # two clocks
        assert answer.began - slack <= answer.reached[0]
        assert len(answer.reached) == len(answer.arrivals)
        assert all(a <= b + slack for a, b in zip(answer.reached, answer.arrivals, strict=True))
        assert len(descendants(server.pid)) == 1
        assert asyncio.run(ask(server.port, body))["usage"]["completion_tokens"] == 12
        with pytest.raises(ServerError, match="max_tokens"):
            asyncio.run(stream(server.port, body | {"max_tokens": -1}))


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo it has no weights; exit 3"]
    with pytest.raises(ServerError, match="it has no weights"), server_process(command, tmp_path / "log.txt"):
        pytest.fail("it has started")


def test_latencies_are_of_all_runs() -> None:
    runs = [[Streamed(10.0, [10.5, 10.6, 10.8])], [Streamed(20.0, [20.1, 20.2])]]
    figures = front_end.latencies(runs)
    assert figures["ttft_ms"] == {"p50": 100.0, "p99": 100.0}
    assert figures["itl_ms"]["p50"] == 100.0


def test_two_servers_are_compared_round_by_round() -> None:
    ours = [{"tokens_per_second": 100.0, "ttft_ms_p50": 4.0}, {"tokens_per_second": 300.0, "ttft_ms_p50": 2.0}]
    theirs = [{"tokens_per_second": 50.0, "ttft_ms_p50": 4.0}, {"tokens_per_second": 100.0, "ttft_ms_p50": 8.0}]
    row = peer_servers.compared({"jaxllm": ours, "vllm": theirs})
    assert row["jaxllm"] == {"tokens_per_second": 200.0, "ttft_ms_p50": 3.0}
    assert row["vllm"] == {"tokens_per_second": 75.0, "ttft_ms_p50": 6.0}
    assert row["jaxllm_by_vllm"] == {"tokens_per_second": 2.5, "ttft_ms_p50": 0.625}
    assert bench_frontend.verdicts({"beside_vllm": [row]}) == {"by_vllm": True}


def test_a_peer_needs_a_checkpoint_that_it_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "none.gguf"
    with pytest.raises(SystemExit):
        run_frontend("--peers")
    assert "--vllm-python" in capsys.readouterr().err
    assert run_frontend("--peers", "--quick", "--model", str(model), "--vllm-python", "python") == 1
    assert "--hf-python" in capsys.readouterr().err


def run_frontend(*args: str) -> int:
    """Run the script's main with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["frontend", *args])
        return bench_frontend.main()


def test_goals_are_judged_by_the_worst_row() -> None:
    rows: list[dict[str, Any]] = [{"streams": 16, "ratio": 0.96}, {"streams": 64, "ratio": 0.94}]
    assert bench_frontend.verdicts({"beside_llm_generate": rows}) == {"ratio": False}
    assert bench_frontend.verdicts({"beside_llm_generate": rows[:1]}) == {"ratio": True}

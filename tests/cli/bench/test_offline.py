"""`jaxllm bench throughput` and `latency`: the arithmetic over a model that only turns a clock, and one real engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.cli.bench import offline
from jaxllm.cli.main import main, make_parser
from jaxllm.text.tokenizer import load_named_tokenizer
from tests.models.tiny import folder


class ClockModel:
    """Every call takes as many seconds as the next of `durations` says; an output has the tokens it was asked for."""

    def __init__(self, tokenizer: str, cache: Path, durations: list[float]) -> None:
        front = SimpleNamespace(require_tokenizer=lambda: load_named_tokenizer(tokenizer, str(cache)))
        self.llm_engine: Any = SimpleNamespace(front=front, model_config=SimpleNamespace(get_vocab_size=lambda: 256))
        self.now = 0.0
        self.calls: list[tuple[Any, Any]] = []
        self.is_shut_down = False
        self._durations = iter(durations)

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> Any:
        self.calls.append((prompts, sampling_params))
        self.now += next(self._durations)
        per_prompt = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        return [
            SimpleNamespace(
                prompt_token_ids=[1] * 5, outputs=[SimpleNamespace(token_ids=[2] * params.max_tokens)] * params.n
            )
            for params in per_prompt
        ]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def run(self, *words: str) -> int:
        """Run the subcommand with this model."""
        args = make_parser()[0].parse_args(["bench", *words, "--model", "m"])
        run = offline.run_latency if words[0] == "latency" else offline.run_throughput
        return run(args, lambda _: self, lambda: self.now)


def test_latency(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = ClockModel(tokenizer, tmp_path, [100.0, 100.0, 4.0, 1.0, 3.0, 2.0])
    out = tmp_path / "latency.json"
    words = (
        "--input-len",
        "7",
        "--output-len",
        "9",
        "--batch-size",
        "3",
        "--num-iters-warmup",
        "2",
        "--num-iters",
        "4",
    )
    assert model.run("latency", *words, "--output-json", str(out)) == 0
    assert "Avg latency: 2.500000 seconds\n" in (shown := capsys.readouterr().out)
    assert "50% percentile latency: 2.500000 seconds\n" in shown
    assert "99% percentile latency: 3.970000 seconds\n" in shown
    document = json.loads(out.read_text())
    assert (document["avg_latency"], document["latencies"]) == (2.5, [4.0, 1.0, 3.0, 2.0])
    assert document["percentiles"]["25"] == 1.75
    prompts, params = model.calls[0]
    assert [len(each["prompt_token_ids"]) for each in prompts] == [7] * 3
    assert (params.max_tokens, params.ignore_eos) == (9, True)
    assert model.is_shut_down


def test_throughput(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = ClockModel(tokenizer, tmp_path, [4.0])
    out = tmp_path / "throughput.json"
    words = ("--input-len", "6", "--output-len", "10", "--num-prompts", "8", "--n", "2", "--disable-detokenize")
    assert model.run("throughput", *words, "--output-json", str(out)) == 0
    assert "Throughput: 2.00 requests/s, 50.00 total tokens/s, 40.00 output tokens/s\n" in (
        shown := capsys.readouterr().out
    )
    assert "Total num prompt tokens:  40\nTotal num output tokens:  160\n" in shown
    assert json.loads(out.read_text()) == {
        "elapsed_time": 4.0,
        "num_requests": 8,
        "total_num_tokens": 200,
        "requests_per_second": 2.0,
        "tokens_per_second": 50.0,
    }
    prompts, params = model.calls[0]
    assert len(prompts) == 8
    assert not params[0].detokenize
    assert model.is_shut_down


@pytest.mark.engine
def test_a_real_engine(capsys: pytest.CaptureFixture[str]):
    engine = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
    sizes = ["--max-num-batched-tokens", "16", "--max-num-seqs", "8"]
    batch = [
        "--input-len",
        "4",
        "--output-len",
        "3",
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
    ]
    assert main(["bench", "latency", str(folder("llama3_tied")), *engine, *sizes, *batch]) == 0
    assert "Avg latency: " in capsys.readouterr().out


@pytest.mark.parametrize("what", ["latency", "throughput"])
def test_misuse(what: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", what]) == 2
    assert "MODEL" in capsys.readouterr().err
    assert main(["bench", what, "m", "--output-json", "nowhere/file.json"]) == 2
    assert "--output-json" in capsys.readouterr().err

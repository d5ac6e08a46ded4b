"""scripts/benchmark.py --task gguf: what it asks, judges and writes."""

from __future__ import annotations

import ctypes
import json
import math
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark
import numpy as np
import pytest
from peers import quantized
from peers.contestants import Contestant
from peers.worker import PROGRAMS, Answer, BenchmarkError

from pallas_kernels.native import processor
from tests.models.tiny import folder
from tests.scripts.fake_process import FakeProcess

pytestmark = pytest.mark.scripts

VOCAB = 1000


class FakeWorker(FakeProcess):
    """Stands in for a process that takes a millisecond for each token that goes in or comes out."""

    def __init__(self, *, short: bool = False) -> None:
        super().__init__()
        self.short, self.asked = short, []

    def call(self, method: str, *arguments: Any) -> Answer:
        self.asked.append(method)
        values = {
            "versions": {"x": "1"}, "instructions": "avx2", "array_bytes": quantized.KV_BYTES + 100,
            "shapes": {"vocab_size": VOCAB}, "losses": [1.0, 3.0], "tokens": [[1, 2], [3, 4]],
        }  # fmt: skip
        if method != "generate":
            return Answer(values.get(method), 0.0, 20.0, 2**30)
        prompts, lengths = arguments
        outputs = [[0] * (length - self.short) for length in lengths]
        return Answer(outputs, (sum(map(len, prompts)) + sum(lengths)) / 1000, 20.0, 2**30)


def make_run(monkeypatch: pytest.MonkeyPatch, worker: FakeWorker, name: str = quantized.OURS) -> quantized.Run:
    monkeypatch.setattr(Contestant, "start", lambda self, cache: worker)
    tasks = quantized.Tasks.make(VOCAB, quick=False)
    return quantized.Run(Contestant(name, "X", "program", "none"), tasks, [[1, 2], [3, 4]], Path("none"))


class TestRun:
    def test_cold(self, monkeypatch: pytest.MonkeyPatch):
        worker = FakeWorker()
        result = make_run(monkeypatch, worker).cold()
        assert worker.asked[0] == "generate", "nothing comes before the first token"
        assert worker.asked.index("array_bytes") < worker.asked.index("losses"), "asking for losses makes arrays"
        assert result["cold_s"] == 10.0
        assert result["perplexity"] == pytest.approx(math.exp(2.0), abs=1e-4)

    def test_the_other_is_not_asked_for_its_arrays(self, monkeypatch: pytest.MonkeyPatch):
        worker = FakeWorker()
        assert "array_bytes" not in make_run(monkeypatch, worker, quantized.THEIRS).cold()
        assert "array_bytes" not in worker.asked

    def test_warm(self, monkeypatch: pytest.MonkeyPatch):
        assert make_run(monkeypatch, FakeWorker()).warm() == {
            "warm_s": 10.0,
            "stream": pytest.approx(128 / 0.160, rel=1e-4),
            "prefill": pytest.approx(512 / 0.513, rel=1e-4),
            "streams": pytest.approx(128 / 0.160, rel=1e-4),
            "peak_gib": 1.0,
        }

    def test_shorter_outputs_end_it(self, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(BenchmarkError, match="X gave"):
            make_run(monkeypatch, FakeWorker(short=True)).warm()


def result(label: str, speed: float, **more: Any) -> dict[str, Any]:
    one = {"stream": speed, "prefill": 10 * speed, "warm_s": 2.0, "peak_gib": 0.5}
    rounds = [one | {"streams": each * speed} for each in (4.0, 0.1, 9.0)]
    return {"label": label, "cold_s": 4.0, "instructions": "avx2", "rounds": rounds} | more


def make_results() -> dict[str, Any]:
    ours = result("jaxllm", 100.0, perplexity=20.05, array_bytes=1120)
    rounded = result("jaxllm, cpu_int8", 200.0, perplexity=20.2)
    theirs = result("llama.cpp", 50.0, perplexity=20.0)
    contestants = {quantized.OURS: ours, quantized.ROUNDED: rounded, quantized.THEIRS: theirs}
    return {"file_bytes": 100, "kv_bytes": 1000, "contestants": contestants}


def test_table():
    heading, stream, _, streams, *_, perplexity = quantized.table(make_results())
    assert heading == ["", "jaxllm", "jaxllm, cpu_int8", "llama.cpp"]
    assert stream[1:] == ["100 (2.00x)", "200 (4.00x)", "50"]
    assert streams[1:] == ["400 (2.00x)", "800 (4.00x)", "200"], "medians of the rounds"
    assert perplexity[1:] == ["20.050", "20.200", "20.000"]
    alone = make_results()
    del alone["contestants"]["llamacpp"]
    assert quantized.table(alone)[1][1:] == ["100", "200"]


def test_targets():
    verdicts = [(line.split()[0], line.split()[-1]) for line in quantized.judge(make_results())]
    exact = [("met", "2.000"), ("met", "2.000"), ("missed", "2.000"), ("met", "1.002")]
    rounded = [*[("met", "4.000")] * 3, ("missed", "1.010")]
    assert verdicts == [("missed", "1.200"), *exact, *rounded]
    alone = make_results()
    del alone["contestants"]["llamacpp"]
    assert len(quantized.judge(alone)) == 1


class TestCommandLine:
    def run(self, monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmark.py", "--task", "gguf", *map(str, words)])
        return benchmark.main()

    def test_the_whole_run(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        started: list[str] = []
        monkeypatch.setattr(Contestant, "start", lambda self, cache: started.append(self.name) or FakeWorker())
        file = tmp_path / "m.Q4_1.gguf"
        file.write_bytes(bytes(100))
        words = ("--quick", "--rounds", 2, "--model", file, "--llamacpp-python", "/somewhere/python", "--out", tmp_path)
        assert self.run(monkeypatch, *words) == 0
        turn = [quantized.OURS, quantized.ROUNDED, quantized.THEIRS]
        whether_it_starts, sizes = turn[1], turn[0]
        assert started == [whether_it_starts, sizes, *turn, *turn, *turn[1:], turn[0]], "cold starts, rounds in turns"
        saved = json.loads((tmp_path / "gguf_auto.json").read_text())
        assert "somewhere" not in json.dumps(saved)
        assert saved["command"] == "scripts/benchmark.sh --quick --task gguf --rounds 2"
        assert [len(each["rounds"]) for each in saved["files"]["m.Q4_1.gguf"]["contestants"].values()] == [2, 2, 2]
        assert "m.Q4_1.gguf" in capsys.readouterr().out

    def test_where_nothing_is_rounded(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ):
        def start(contestant: Contestant, _: Path) -> FakeWorker:
            if contestant.name == quantized.ROUNDED:
                raise BenchmarkError("it would round nothing")
            return FakeWorker()

        monkeypatch.setattr(Contestant, "start", start)
        file = tmp_path / "m.Q8_0.gguf"
        file.write_bytes(bytes(100))
        assert self.run(monkeypatch, "--quick", "--model", file, "--llamacpp-python", "x", "--out", tmp_path) == 0
        saved = json.loads((tmp_path / "gguf_auto.json").read_text())
        assert list(saved["files"]["m.Q8_0.gguf"]["contestants"]) == [quantized.OURS, quantized.THEIRS]
        assert "float16 KV is left out: it would round nothing" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [("--hf-python", "x"), ("--sweep",), ("--readme",)])
    def test_what_does_not_go_together(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
    ):
        with pytest.raises(SystemExit):
            self.run(monkeypatch, *words)
        assert words[0] in capsys.readouterr().err or "--task gguf goes with" in capsys.readouterr().err


def test_our_own_worker_takes_losses(monkeypatch: pytest.MonkeyPatch):
    """Greedy tokens have the same log-probabilities as in a prompt."""
    monkeypatch.syspath_prepend(PROGRAMS)
    limits = {"skip_tokenizer_init": True, "enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    settings = {"library": "jaxllm", "model": str(folder("llama3_tied")), "dtype": "float32", "engine": limits}
    engine = import_module("vllm_api").Engine(settings)
    ((token, [[_, first]]), (after, [[_, second]])) = engine.reference([[5, 6, 7]], [2], 1)[0]
    sums = [mean * num for mean, num in zip(engine.losses([[5, 6, 7], [5, 6, 7, token, after]]), (2, 4), strict=True)]
    assert engine.array_bytes() > 0
    assert engine.instructions() == processor.current().name
    engine.llm.shutdown()
    assert sums[1] - sums[0] == pytest.approx(-first - second, abs=1e-4)


class FakeLlama(SimpleNamespace):
    """llama.cpp's functions, of a model whose likeliest token is the one after the last, by `WEIGHT`."""

    WEIGHT = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.rows = np.zeros((0, 8), np.float32)

    def llama_batch_init(self, size: int, *_: int) -> Any:
        places = [[0] for _ in range(size)]
        return SimpleNamespace(
            n_tokens=0, token=[0] * size, pos=[0] * size, n_seq_id=[0] * size, seq_id=places, logits=[0] * size
        )

    def llama_decode(self, _: object, batch: Any) -> int:
        asked = [batch.token[index] for index in range(batch.n_tokens) if batch.logits[index]]
        self.rows = np.zeros((len(asked), 8), np.float32)
        self.rows[np.arange(len(asked)), [(token + 1) % 8 for token in asked]] = self.WEIGHT
        return 0

    def llama_get_logits(self, _: object) -> Any:
        return self.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def __getattr__(self, name: str) -> Any:
        if name == "llama_vocab_n_tokens":
            return lambda *_: 8
        return lambda *_: SimpleNamespace()


def test_their_worker_batches_and_takes_losses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlama())
    lookup = SimpleNamespace(LlamaPromptLookupDecoding=None)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", lookup)
    monkeypatch.delitem(sys.modules, "llamacpp_api", raising=False)
    model = import_module("llamacpp_api").Model({"gguf": "none", "streams": 2})
    monkeypatch.delitem(sys.modules, "llamacpp_api")
    assert model.generate([[1, 2], [5], [6]], [3, 1, 2]) == [[3, 4, 5], [6], [7, 0]]
    right = math.log(math.exp(3) + 7) - 3
    assert model.losses([[1, 2, 3], [1, 2, 7]]) == pytest.approx([right, right + 1.5])

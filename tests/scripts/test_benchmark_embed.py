"""scripts/benchmark.py --task embed: its texts, and what it compares, judges and writes."""

from __future__ import annotations

import json
import statistics
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
import pytest
from peers import embedding
from peers.contestants import Contestant
from peers.worker import PROGRAMS, Answer, BenchmarkError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from tests.models.tiny import folder
from tests.scripts.fake_process import FakeProcess

pytestmark = pytest.mark.scripts

WORDS = ("apple", "pear", "plum", "##ing", "é", "x", "42")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder of sentence-transformers whose tokenizer knows some words, and adds two tokens to each text."""
    made = tmp_path / "model"
    made.mkdir()
    vocab = {word: number for number, word in enumerate(("[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_truncation(8)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (made / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "do_lower_case": False}))
    return made


class TestTasks:
    def test_texts_are_what_the_docstring_says(self, model: Path):
        tasks, texts = embedding.Tasks.make(model, quick=False), embedding.Texts(model)
        lengths = [texts.num_tokens([text]) for text in tasks.measured]
        assert len(lengths) == 512
        assert sum(lengths) == tasks.num_tokens
        assert (min(lengths), max(lengths)) == embedding.LENGTHS
        assert 55 < statistics.median(lengths) < 75
        assert 0.8 < statistics.stdev(np.log(lengths).tolist()) < 1.1
        assert set(" ".join(tasks.measured).split()) == {"apple", "pear", "plum"}

    def test_the_same_in_every_run(self, model: Path):
        assert embedding.Tasks.make(model, quick=True) == embedding.Tasks.make(model, quick=True)

    def test_texts_are_read_to_their_end_by_everyone(self, model: Path, tmp_path: Path):
        made = embedding.with_whole_length(model, tmp_path / "scratch")
        assert json.loads((made / "sentence_bert_config.json").read_text()) == {
            "max_seq_length": 512,
            "do_lower_case": False,
        }
        assert (made / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        assert json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"] == 256

    @pytest.mark.parametrize("change", ["no limit", "few positions"])
    def test_other_models_are_read_as_they_are(self, model: Path, tmp_path: Path, change: str):
        if change == "no limit":
            (model / "sentence_bert_config.json").unlink()
        else:
            (model / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
        assert embedding.with_whole_length(model, tmp_path / "scratch") == model


class FakeWorker(FakeProcess):
    """Stands in for a process: a text takes a hundredth of a second, in batches of 32 half of that."""

    def __init__(self, vectors: np.ndarray) -> None:
        super().__init__()
        self.vectors, self.asked = vectors, []

    def call(self, method: str, *arguments: Any) -> Answer:
        self.asked.append((method, *arguments[1:]))
        seconds = 0.0
        if method == "embed":
            seconds = len(arguments[0]) * (0.005 if arguments[1:] == (32,) else 0.01)
        value = self.vectors.tolist() if method == "vectors" else {"x": "1"} if method == "versions" else None
        return Answer(value, seconds, 20.0, 2**30)


REFERENCE = np.random.default_rng(0).normal(size=(24, 16))


def make_run(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    worker: FakeWorker,
    program: str = "vllm_api",
    dtype: str = "float32",
) -> embedding.Run:
    monkeypatch.setattr(Contestant, "start", lambda self, cache: worker)
    contestant = Contestant("x", "X", program, "none", {"dtype": dtype})
    return embedding.Run(contestant, embedding.Tasks.make(model, quick=True), REFERENCE, Path("none"))


class TestRun:
    def test_cold(self, monkeypatch: pytest.MonkeyPatch, model: Path):
        worker = FakeWorker(3 * REFERENCE)
        result = make_run(monkeypatch, model, worker).cold()
        assert worker.asked[0] == ("embed",), "nothing comes before the first embedding"
        assert (result["cold_s"], result["lowest_cosine"], result["dtype"]) == (10.0, 1.0, "float32")
        assert "batch_size" not in result

    def test_best_size_of_a_batch(self, monkeypatch: pytest.MonkeyPatch, model: Path):
        worker = FakeWorker(REFERENCE)
        result = make_run(monkeypatch, model, worker, "sentence_transformers_api").cold()
        assert result["batch_size"] == 32
        assert result["batch_sizes_texts_per_s"] == {"8": 100, "16": 100, "32": 200, "64": 100, "128": 100}

    def test_warm(self, monkeypatch: pytest.MonkeyPatch, model: Path):
        worker = FakeWorker(REFERENCE)
        run = make_run(monkeypatch, model, worker, "sentence_transformers_api")
        assert run.warm(32) == {
            "warm_s": 10.0,
            "texts_per_s": pytest.approx(200.0),
            "tokens_per_s": pytest.approx(200 * run.tasks.num_tokens / 24, rel=1e-6),
            "one_ms": 5.0,
            "peak_gib": 1.0,
        }
        assert {asked for asked in worker.asked[1:] if asked[0] == "embed"} == {("embed", 32)}
        worker.asked.clear()
        run.warm(None)
        assert {asked for asked in worker.asked if asked[0] == "embed"} == {("embed",)}

    @pytest.mark.parametrize(
        ("noise", "dtype"),
        [pytest.param(0.1, "bfloat16", id="another model"), pytest.param(0.01, "float32", id="no rounding in float32")],
    )
    @pytest.mark.parametrize("phase", ["cold", "warm"])
    def test_other_embeddings_end_it(
        self, monkeypatch: pytest.MonkeyPatch, model: Path, noise: float, dtype: str, phase: str
    ):
        vectors = REFERENCE + noise * np.random.default_rng(1).normal(size=REFERENCE.shape)
        run = make_run(monkeypatch, model, FakeWorker(vectors), dtype=dtype)
        with pytest.raises(BenchmarkError, match="X disagrees"):
            run.cold() if phase == "cold" else run.warm(None)

    def test_rounding_of_bfloat16_is_none(self, monkeypatch: pytest.MonkeyPatch, model: Path):
        vectors = REFERENCE + 0.01 * np.random.default_rng(1).normal(size=REFERENCE.shape)
        assert 0.999 < make_run(monkeypatch, model, FakeWorker(vectors), dtype="bfloat16").cold()["lowest_cosine"] < 1

    def test_no_numbers_and_too_few_end_it(self, monkeypatch: pytest.MonkeyPatch, model: Path):
        with pytest.raises(BenchmarkError, match="X disagrees"):
            make_run(monkeypatch, model, FakeWorker(np.nan * REFERENCE)).cold()
        with pytest.raises(BenchmarkError, match="shape"):
            make_run(monkeypatch, model, FakeWorker(REFERENCE[1:])).cold()


def test_rounds_take_turns_and_the_reference_is_another_s(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path):
    started: list[str] = []
    order: list[str] = []

    def start(self: Contestant, cache: Path) -> FakeWorker:
        started.append(f"{self.program} {self.settings['dtype']}")
        return FakeWorker(REFERENCE)

    monkeypatch.setattr(Contestant, "start", start)
    monkeypatch.setattr(embedding.Run, "cold", lambda self: {"rounds": []})
    monkeypatch.setattr(embedding.Run, "warm", lambda self, _size: order.append(self.contestant.name) or {"x": 1.0})
    runners = embedding.contestants(model, ["bfloat16"], vllm="v", hf="h")
    figures = embedding.compare(runners, model, rounds=2, quick=True, scratch=tmp_path)
    assert started == ["sentence_transformers_api float32"]
    ours, theirs, vllm = (f"{name}_bfloat16" for name in ("jaxllm", "sentence_transformers", "vllm"))
    assert order == [ours, theirs, vllm, theirs, vllm, ours]
    assert [len(result["rounds"]) for result in figures["contestants"].values()] == [2, 2, 2]


def test_who_is_compared(model: Path):
    runners = embedding.contestants(model, embedding.DTYPES, vllm="v", hf=None)
    assert [(each.name, each.python) for each in runners] == [
        ("jaxllm_float32", sys.executable),
        ("jaxllm_bfloat16", sys.executable),
        ("vllm_float32", "v"),
        ("vllm_bfloat16", "v"),
    ]
    assert [each.settings["library"] for each in runners] == ["jaxllm", "jaxllm", "vllm", "vllm"]


def make_report() -> dict[str, Any]:
    def result(label: str, dtype: str, speed: float, **more: Any) -> dict[str, Any]:
        one = {"tokens_per_s": 9 * speed, "one_ms": 5.0, "warm_s": 2.0, "peak_gib": 0.5}
        rounds = [one | {"texts_per_s": each * speed} for each in (1.0, 0.1, 3.0)]
        return {"label": label, "dtype": dtype, "cold_s": 4.0, "lowest_cosine": 0.99999, "rounds": rounds} | more

    return {
        "tasks": {"texts": 512, "tokens": 49152, "lengths": [4, 500]},
        "contestants": {
            "jaxllm_float32": result("jaxllm, float32", "float32", 100.0),
            "jaxllm_bfloat16": result("jaxllm, bfloat16", "bfloat16", 300.0),
            "vllm_float32": result("vLLM, float32", "float32", 40.0),
            "sentence_transformers_float32": result("ST, float32", "float32", 60.0, batch_size=16),
            "vllm_bfloat16": result("vLLM, bfloat16", "bfloat16", 150.0),
        },
    }


def test_table_compares_the_same_dtypes():
    heading, texts, *others = embedding.table(make_report())
    assert heading[1:3] == ["jaxllm, float32", "jaxllm, bfloat16"]
    assert texts == ["texts/s", "100", "300", "40 (2.5x)", "60 (1.7x)", "150 (2x)"]
    assert others[-2] == ["batch size, the best of its own", "", "", "", "16", ""]


def test_target_is_of_the_better_peer():
    float32, bfloat16 = embedding.judge(make_report())
    assert (float32.split()[0], float32.split()[-1]) == ("missed", "1.67")
    assert (bfloat16.split()[0], bfloat16.split()[-1]) == ("met", "2.00")
    alone = make_report()
    alone["contestants"] = {name: each for name, each in alone["contestants"].items() if name.startswith("jaxllm")}
    assert embedding.judge(alone) == []


class TestCommandLine:
    def run(self, monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmark.py", "--task", "embed", *map(str, words)])
        return benchmark.main()

    def test_the_whole_run(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
    ):
        monkeypatch.setattr(Contestant, "start", lambda self, cache: FakeWorker(REFERENCE))
        words = ("--quick", "--rounds", 1, "--model", model, "--hf-python", "/somewhere/python", "--out", tmp_path)
        assert self.run(monkeypatch, *words) == 0
        saved = json.loads((tmp_path / "embed_float32_bfloat16.json").read_text())
        assert "somewhere" not in json.dumps(saved)
        assert saved["command"] == (
            "scripts/benchmark.py --hf-python PATH --quick --task embed --model FOLDER --rounds 1"
        )
        assert saved["settings"]["dtype"] == "float32 and bfloat16"
        assert saved["contestants"]["sentence_transformers_float32"]["batch_size"] == 32
        assert {"cpu", "cores"} <= set(saved["machine"])
        shown = capsys.readouterr().out
        assert "texts/s" in shown
        assert "no measurements" in shown
        assert self.run(monkeypatch, "--quick", "--render", "--out", tmp_path) == 0
        assert "texts/s" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "words", [("--sweep",), ("--workloads",), ("--llamacpp-python", "x"), ("--readme",), (), ("--model", "none")]
    )
    def test_what_does_not_go_together(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, words: tuple[str, ...]
    ):
        arguments = words if not words or "--model" in words else ("--model", model, *words)
        with pytest.raises(SystemExit):
            self.run(monkeypatch, *arguments)
        assert words[0] in capsys.readouterr().err if words else "--model FOLDER" in capsys.readouterr().err


def test_our_own_worker(monkeypatch: pytest.MonkeyPatch):
    """The worker runs with the installed library on a tiny model."""
    monkeypatch.syspath_prepend(PROGRAMS)
    limits = {"runner": "pooling", "skip_tokenizer_init": True, "enforce_eager": True}
    settings = {"library": "jaxllm", "model": str(folder("bert")), "dtype": "float32", "engine": limits}
    engine = import_module("vllm_api").Engine(settings)
    engine.embed([[1, 5, 2], [1, 2]])
    vectors = np.array(engine.vectors())
    engine.llm.shutdown()
    assert vectors.shape == (2, 32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)

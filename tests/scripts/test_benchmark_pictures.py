"""scripts/benchmark.py --task pictures: what it compares, judges and writes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import benchmark
import pytest
from peers import seeing
from peers.contestants import Contestant
from peers.worker import Answer, BenchmarkError

from tests.scripts.fake_process import FakeProcess

pytestmark = pytest.mark.scripts


class FakeWorker(FakeProcess):
    """A picture takes its library's time, one that was shown before a tenth of that."""

    def __init__(
        self,
        library: str,
        *,
        error: float = 0.0,
        wrong: tuple[list[int], ...] = ([0], [1], [2, 0]),
        ids: int = 0,
        influence: float = 2.0,
    ) -> None:
        super().__init__()
        self.seconds = {"jaxllm": 1.0, "hf": 2.0, "vllm": 0.5}[library]
        self.tower_s = None if library == "vllm" else 2 * self.seconds
        self.error, self.wrong, self.ids, self.influence = error, wrong, ids, influence
        self.drawn: set[int] = set()
        self.shown: set[int] = set()

    def call(self, method: str, *arguments: Any) -> Answer:
        if method == "draw":
            assert self.drawn.isdisjoint(arguments[0]), "a picture comes twice"
            self.drawn |= set(arguments[0])
            return Answer(None, 9.0, 20.0, 0)
        if method == "versions":
            return Answer({"x": "1"}, 0.0, 20.0, 0)
        if method == "tower":
            return Answer(self.tower_s, 9.0, 20.0, 2**30)
        prompts, pictures = arguments[:2]
        assert [prompt.count("<image>") for prompt in prompts] == list(map(len, pictures))
        seconds = sum(0.1 if each in self.shown else 1.0 for numbers in pictures for each in numbers) * self.seconds
        self.shown |= {each for numbers in pictures for each in numbers}
        assert self.shown <= self.drawn
        value = [self.answer(numbers) for numbers in pictures] if method == "answers" else None
        return Answer(value, seconds, 20.0, 0)

    def answer(self, numbers: list[int]) -> list[Any]:
        moved = self.influence * sum(numbers) + (self.error if numbers in self.wrong else 0.0)
        return [[len(numbers), self.ids], [[token, moved - token] for token in range(seeing.TOP)]]


def start_fakes(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """Start fakes in place of processes; `changes` are those of HF's. Returns the names in the order of their start."""
    order: list[str] = []

    def start(self: Contestant, cache: Path) -> FakeWorker:
        order.append(self.name)
        library = self.name.split("_")[0]
        return FakeWorker(library, **(changes if library == "hf" else {}))

    monkeypatch.setattr(Contestant, "start", start)
    return order


def compare(tmp_path: Path, dtypes: tuple[str, ...] = ("float32",), rounds: int = 1) -> dict[str, Any]:
    runners = seeing.contestants(tmp_path, dtypes, vllm="v", hf="h")
    return seeing.compare("smolvlm", runners, rounds=rounds, quick=False, scratch=tmp_path)


def test_figures_of_a_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    start_fakes(monkeypatch)
    figures = compare(tmp_path)["contestants"]
    [ours], [theirs] = figures["jaxllm_float32"]["rounds"], figures["vllm_float32"]["rounds"]
    assert ours == {
        "one_ms": 1000.0,
        "second_ms": 100.0,
        "second_sooner": 10.0,
        "eight_ms": 8000.0,
        "joint_ms": 8000.0,
        "pictures_per_s": 1.0,
        "tower_per_s": 2.0,
        "start_s": 10.0,
        "peak_gib": 1.0,
    }
    assert theirs["eight_ms"] == 4000.0
    assert "tower_per_s" not in theirs


def test_rounds_take_turns_and_the_reference_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    order = start_fakes(monkeypatch)
    compare(tmp_path, rounds=2)
    ours, hf, vllm = (f"{name}_float32" for name in ("jaxllm", "hf", "vllm"))
    assert order == [ours, hf, vllm, hf, vllm, ours]


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({"error": 0.01}, "float32", "HF, float32 disagrees"),
        ({"error": 0.2}, "bfloat16", "HF, bfloat16 disagrees"),
        ({"error": float("nan")}, "bfloat16", "disagrees"),
        ({"error": float("nan"), "wrong": ([1],)}, "bfloat16", "differ by nan"),
        ({"error": 0.2, "wrong": ([1],)}, "bfloat16", "differ by 0.2"),
        ({"ids": 1}, "float32", "other tokens"),
    ],
)
def test_other_answers_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], dtype: str, message: str
):
    start_fakes(monkeypatch, **changes)
    with pytest.raises(BenchmarkError, match=message):
        compare(tmp_path, (dtype,))


def test_rounding_is_no_other_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    start_fakes(monkeypatch, error=0.0625)
    figures = compare(tmp_path, ("bfloat16",))["contestants"]
    assert figures["hf_bfloat16"]["difference"] == 0.0625


def test_a_blind_reference_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(
        Contestant, "start", lambda self, cache: FakeWorker("jaxllm", influence=0.1)
    )  # as much as rounding
    with pytest.raises(BenchmarkError, match="another picture moves"):
        compare(tmp_path)


def test_other_likeliest_tokens_are_infinitely_far():
    left, right = ([[token, 0.0] for token in range(first, first + seeing.TOP)] for first in (0, 12))
    assert seeing._difference(left, left) == 0
    assert seeing._difference(left, right) == float("inf")


def test_one_nan_makes_a_difference():
    top = [[token, float(-token)] for token in range(seeing.TOP)]
    broken = [[token, float("nan") if token == 7 else value] for token, value in top]
    assert math.isnan(seeing._difference(top, broken))
    with pytest.raises(BenchmarkError, match="only nan"):
        seeing._influence([([1], top), ([1], broken)])


class TestCommandLine:
    def run(self, monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmark.py", "--task", "pictures", *map(str, words)])
        return benchmark.main()

    def test_the_whole_run(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        start_fakes(monkeypatch)
        monkeypatch.setattr(seeing, "checkpoint", lambda shape, python: tmp_path)
        monkeypatch.setattr(seeing, "IMAGES", dict.fromkeys(seeing.IMAGES, "<image>"))
        words = ("--hf-python", "/somewhere/h", "--vllm-python", "/somewhere/v", "--rounds", 1, "--out", tmp_path)
        assert self.run(monkeypatch, *words) == 0
        saved = json.loads((tmp_path / "pictures_float32_bfloat16.json").read_text())
        assert "somewhere" not in json.dumps(saved)
        assert saved["command"] == "scripts/benchmark.sh --task pictures --rounds 1"
        assert saved["settings"]["model"] == "SmolVLM-256M and Qwen3-VL-2B, 2 layers"
        assert set(saved["models"]) == {"smolvlm", "qwen3_vl"}
        shown = capsys.readouterr().out
        assert "8,000" in shown
        assert "16,000 (2x)" in shown
        assert "4,000 (0.5x)" in shown
        assert "met       float32: one picture, ms to the first token, 1.5 times hf  2.00" in shown
        assert "missed    bfloat16: one picture, ms to the first token, 1 times vllm  0.50" in shown
        assert "met       float32: second question 5 times sooner  10" in shown
        assert self.run(monkeypatch, "--render", "--out", tmp_path) == 0
        assert capsys.readouterr().out == shown

    def test_one_of_the_models(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        start_fakes(monkeypatch)
        monkeypatch.setattr(seeing, "checkpoint", lambda shape, python: tmp_path)
        assert self.run(monkeypatch, "--model", "smolvlm", "--dtype", "float32", "--out", tmp_path) == 0
        saved = json.loads((tmp_path / "pictures_float32.json").read_text())
        assert set(saved["models"]) == {"smolvlm"}
        assert saved["command"] == ("scripts/benchmark.py --task pictures --model smolvlm --dtype float32 --rounds 3")

    def test_other_models_are_refused(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit):
            self.run(monkeypatch, "--model", "llava")
        assert "smolvlm and qwen3_vl, not llava" in capsys.readouterr().err


def test_a_checkpoint_needs_hf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(seeing, "default_dir", lambda: tmp_path)
    with pytest.raises(BenchmarkError, match="--hf-python"):
        seeing.checkpoint("smolvlm", None)
    (tmp_path / "random-smolvlm").mkdir()
    assert seeing.checkpoint("smolvlm", None) == tmp_path / "random-smolvlm"

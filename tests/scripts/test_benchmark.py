"""scripts/benchmark.py: what it compares, judges and writes; other libraries do not run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import benchmark
import pytest
from peers import agreement, beside, caching, charts, compare, contestants, report, sweep
from peers.prompts import FIRST_PLAIN_ID, Source
from peers.worker import PROGRAMS, Answer, BenchmarkError, Worker, environment, read_files

import jaxllm
from tests.models.tiny import folder
from tests.scripts.fake_process import FakeProcess

pytestmark = pytest.mark.scripts

SHAPES = {
    "vocab_size": 1000, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "intermediate_size": 96,
}  # fmt: skip
OWN_LIBRARY = {
    "decisions_hf": {"torch", "transformers"},
    "hardware_speeds": {"jax", "numpy", "pallas_kernels"},
    "jaxllm_engines": {"jaxllm"},
    "llamacpp_api": {"llama_cpp", "numpy"},
    "pictures": {"PIL", "numpy"},
    "protocol": set(),
    "save_checkpoint": {"torch", "transformers"},
    "save_random": {"torch", "transformers"},
    "save_seeing": {"torch", "transformers"},
    "seeing_api": set(),
    "seeing_hf": {"torch", "transformers"},
    "sentence_transformers_api": {"sentence_transformers", "torch", "transformers"},
    "torch_layers": {"torch", "transformers"},
    "transformers_api": {"torch", "transformers"},
    "vllm_api": set(),
    "speech_hf": {"numpy", "torch", "transformers"},
    "speech_jaxllm": {"jaxllm", "numpy"},
    "speech_whispercpp": {"numpy", "pywhispercpp"},
}


def expected(*steps: dict[int, float]) -> list[list[Any]]:
    """Make a reference's output: at each step the likeliest of these tokens."""
    return [[max(step, key=lambda token: step[token]), [[token, step[token]] for token in step]] for step in steps]


class TestAgreement:
    REFERENCE = (expected({5: -0.1, 6: -3.0}, {7: -0.9, 8: -1.1, 9: -1.2}, {1: 0.0}), expected({3: -0.5}))

    def test_the_same(self):
        agreed = agreement.compare("x", self.REFERENCE, [[5, 7, 1], [3]], "float32")
        assert agreed == agreement.Agreement(requests=2, same=2, share_of_tokens=1.0, widest_gap=0.0)

    def test_tokens_beyond_the_reference_do_not_count(self):
        assert agreement.compare("x", self.REFERENCE, [[5, 7, 1, 99], [3, 99]], "float32").same == 2

    def test_near_tie(self):
        agreed = agreement.compare("x", self.REFERENCE, [[5, 8, 99], [3]], "bfloat16")
        assert (agreed.same, agreed.widest_gap) == (1, 0.2)
        assert agreed.share_of_tokens == pytest.approx((1 / 3 + 1) / 2, abs=1e-3)

    @pytest.mark.parametrize(
        ("outputs", "dtype"),
        [
            pytest.param([[5, 8, 1], [3]], "float32", id="no tie in float32"),
            pytest.param([[5, 9, 1], [3]], "bfloat16", id="much less likely"),
            pytest.param([[5, 7, 1], [4]], "bfloat16", id="not among the likeliest"),
        ],
    )
    def test_another_model_is_found(self, outputs: list[list[int]], dtype: str):
        with pytest.raises(BenchmarkError, match="x disagrees"):
            agreement.compare("x", self.REFERENCE, outputs, dtype)

    def test_an_output_that_is_too_short(self):
        with pytest.raises(BenchmarkError, match="request 1 after 0 of 1"):
            agreement.compare("x", self.REFERENCE, [[5, 7, 1], []], "float32")

    def test_a_request_without_output(self):
        with pytest.raises(ValueError, match="zip"):
            agreement.compare("x", self.REFERENCE, [[5, 7, 1]], "float32")


class TestTasks:
    def test_offline_is_what_the_docstring_says(self):
        offline = compare.Tasks.make(1000, quick=False).offline
        lengths = [len(prompt) for prompt in offline.prompts]
        assert len(lengths) == len(offline.lengths) == 64
        assert 16 <= min(lengths) < 32
        assert 240 < max(lengths) <= 256
        assert 16 <= min(offline.lengths) < 24
        assert 120 < max(offline.lengths) <= 128
        assert offline.prompt_tokens == sum(lengths)
        assert offline.output_tokens == sum(offline.lengths)

    def test_fewer_requests_with_longer_prompts(self):
        tasks = compare.Tasks.make(1000, quick=False, requests=3, context=4096)
        lengths = [len(prompt) for prompt in tasks.offline.prompts]
        assert len(lengths) == 3
        assert 2048 <= min(lengths) <= max(lengths) <= 4096
        assert tasks.first_tokens[0].prompt_tokens == 4096

    def test_the_same_in_every_run(self):
        assert compare.Tasks.make(1000, quick=False) == compare.Tasks.make(1000, quick=False)

    def test_no_prompt_begins_like_another(self):
        tasks = compare.Tasks.make(49152, quick=False)
        parts = [tasks.first, tasks.warm_up, tasks.offline, *tasks.streams, *tasks.first_tokens]
        prompts = [tuple(prompt[:16]) for part in parts for prompt in part.prompts]
        assert len(set(prompts)) == len(prompts)

    def test_ids_are_plain_words(self):
        ids = set(Source(300).tokens(5000))
        assert (min(ids), max(ids)) == (FIRST_PLAIN_ID, 299)

    def test_checked_are_the_first_of_those_measured(self):
        tasks = compare.Tasks.make(1000, quick=False)
        assert tasks.checked.prompts == tasks.offline.prompts[: compare.CHECKED_REQUESTS]
        assert max(tasks.checked.lengths) <= compare.CHECKED_TOKENS


class EchoWorker(FakeProcess):
    """Stands in for a process: each token takes a hundredth of a second, and outputs are what `output` says."""

    def __init__(self, output: int = 7, shorter: int = 0) -> None:
        super().__init__()
        self.output, self.shorter, self.asked = output, shorter, []

    def call(self, method: str, *arguments: Any) -> Answer:
        self.asked.append(method)
        if method != "generate":
            return Answer({"jaxllm": "1"}, 0.0, 20.0, 2**30)
        prompts, lengths = arguments
        outputs = [[self.output] * (length - self.shorter) for _, length in zip(prompts, lengths, strict=True)]
        return Answer(outputs, sum(lengths) / 100, 20.0, 2**30)


def make_run(monkeypatch: pytest.MonkeyPatch, worker: EchoWorker, **facts: Any) -> compare.Run:
    contestant = contestants.Contestant("x", "X", "none", "none", {}, **facts)
    monkeypatch.setattr(contestants.Contestant, "start", lambda self, cache: worker)
    tasks = compare.Tasks.make(1000, quick=True)
    reference = [expected(*[{7: -0.1, 8: -0.2, 9: -5.0}] * length) for length in tasks.checked.lengths]
    return compare.Run(contestant, tasks, reference, "bfloat16", Path("none"))


class TestRun:
    def test_figures(self, monkeypatch: pytest.MonkeyPatch):
        run = make_run(monkeypatch, EchoWorker())
        figures = run.warm()
        offline = run.tasks.offline
        assert figures == pytest.approx(
            {
                "warm_s": 10.0,
                "offline_output": 100.0,
                "offline_total": 100 * (1 + offline.prompt_tokens / offline.output_tokens),
                "stream": 100.0,
                "first_token_ms": 10.0,
                "peak_gib": 1.0,
            }
        )

    def test_cold(self, monkeypatch: pytest.MonkeyPatch):
        worker = EchoWorker(output=8)
        result = make_run(monkeypatch, worker).cold()
        assert result["cold_s"] == 10.0
        assert result["agreement"]["same"] == 0
        assert result["agreement"]["widest_gap"] == pytest.approx(0.1)
        assert worker.asked[0] == "generate", "nothing comes before the first token"

    @pytest.mark.parametrize("phase", ["cold", "warm"])
    def test_wrong_outputs_end_it(self, monkeypatch: pytest.MonkeyPatch, phase: str):
        with pytest.raises(BenchmarkError, match="X disagrees"):
            getattr(make_run(monkeypatch, EchoWorker(output=9)), phase)()

    def test_short_outputs_end_it(self, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(BenchmarkError, match="X gave"):
            make_run(monkeypatch, EchoWorker(shorter=1)).warm()

    def test_other_weights_one_at_a_time(self, monkeypatch: pytest.MonkeyPatch):
        run = make_run(monkeypatch, EchoWorker(output=9), shares_weights=False, batches=False)
        assert "agreement" not in run.cold()
        assert set(run.warm()) == {"warm_s", "stream", "first_token_ms", "peak_gib"}


def test_rounds_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    order: list[str] = []
    monkeypatch.setattr(compare, "prepare", lambda *_, **__: (SHAPES, compare.Tasks.make(1000, quick=True), []))
    monkeypatch.setattr(compare, "_hardware_speeds", lambda *_: order.append("!") or HARDWARE)
    monkeypatch.setattr(compare.Run, "cold", lambda self: {"rounds": []})
    monkeypatch.setattr(compare.Run, "warm", lambda self: order.append(self.contestant.name) or {})
    three = [contestants.Contestant(name, name, "none", "none") for name in "abc"]
    report_figures = compare.compare(three, tmp_path, "bfloat16", rounds=2, quick=True, scratch=tmp_path)
    assert "".join(order) == "a!bcbca!", "the hardware is measured beside the first"
    assert report_figures["hardware_speeds"] == HARDWARE
    assert len(report_figures["hardware_speed_rounds"]) == 2
    assert [len(result["rounds"]) for result in report_figures["contestants"].values()] == [2, 2, 2]


HARDWARE: dict[str, Any] = {
    "matmuls": {
        "4": {"layers_s": 0.001, "head_s": 0.0005, "gflop_per_s": 10.0},
        "64": {"layers_s": 0.006, "head_s": 0.002, "gflop_per_s": 100.0},
        "128": {"layers_s": 0.01, "head_s": 0.004, "gflop_per_s": 200.0},
        "512": {"layers_s": 0.02, "head_s": 0.01, "gflop_per_s": 400.0},
    },
    "bandwidth": {"read_gb_per_s": 20.0, "copy_gb_per_s": 15.0},
}
TASKS = {
    "offline_requests": 64, "offline_prompt_tokens": 5120, "offline_output_tokens": 640, "stream_output_tokens": 128,
    "first_token_prompt_tokens": 128, "offline_decodes": [64, 34, 1], "offline_cached_tokens": 1000,
}  # fmt: skip


def test_median_of_each_number():
    rounds = [{"a": {"b": 1.0}, "c": 5.0}, {"a": {"b": 3.0}, "c": 4.0}, {"a": {"b": 2.0}, "c": 9.0}]
    assert compare.median(rounds) == {"a": {"b": 2.0}, "c": 5.0}


def test_num_weights_by_hand():
    attention = 64 * 64 + 64 * 32 + 64 * 32 + 64 * 64
    assert compare.num_weights(SHAPES, head=False) == 2 * (attention + 3 * 64 * 96)
    assert compare.num_weights(SHAPES) == 2 * (attention + 3 * 64 * 96) + 64 * 1000


def test_reference_speeds_by_hand():
    steps = 0.008 + (0.0015 + 0.0065 / 2) + 0.0015
    cached = 1000 * 2 * 2 * SHAPES["num_kv_heads"] * SHAPES["head_dim"] * 2 / 20e9
    seconds = 10 * 0.02 + 0.002 + steps + cached
    assert compare.reference_speeds(HARDWARE, TASKS, SHAPES, "bfloat16") == pytest.approx(
        {
            "offline_output": 640 / seconds,
            "offline_total": 5760 / seconds,
            "stream": 1 / 0.0015,
            "stream_memory": 20e9 / (2 * compare.num_weights(SHAPES)),
            "first_token_ms": 10.5,
        }
    )


def make_report(vllm: float = 500.0, cold: float = 8.0, dtype: str = "bfloat16") -> dict[str, Any]:
    def result(label: str, offline: float, start: float) -> dict[str, Any]:
        one = {"offline_output": offline, "offline_total": 2 * offline, "stream": 50.0, "first_token_ms": 40.0}
        rounds = [one | {"warm_s": 3.0, "peak_gib": 1.5, "stream": stream} for stream in (50.0, 10.0, 90.0)]
        return {
            "label": label,
            "shares_weights": True,
            "versions": {label: "1.0", "python": "3"},
            "cold_s": start,
            "rounds": rounds,
        }

    llamacpp = result("llama.cpp", 0.0, 1.0)
    llamacpp["shares_weights"] = False
    for one in llamacpp["rounds"]:
        del one["offline_output"], one["offline_total"]
    return {
        "date": "2026-01-01",
        "command": "scripts/benchmark.py",
        "machine": {"cpu": "A CPU", "cores": 2},
        "settings": {"model": "M", "dtype": dtype, "rounds": 3},
        "tasks": TASKS,
        "shapes": SHAPES,
        "hardware_speeds": HARDWARE,
        "reference_speed_rounds": [compare.reference_speeds(HARDWARE, TASKS, SHAPES, dtype)] * 3,
        "contestants": {
            "jaxllm": result("jaxllm", 1000.0, cold), "vllm": result("vLLM", vllm, 100.0), "llamacpp": llamacpp,
        },
    }  # fmt: skip


class TestReport:
    def test_medians(self):
        figures = report.medians(make_report()["contestants"])
        assert figures["jaxllm"]["stream"] == 50.0
        assert figures["vllm"]["cold_s"] == 100.0

    def test_times_better_is_above_one_where_ours_is_better(self):
        assert report.times_better(report.Metric("", "", True), 10, 5) == 2
        assert report.times_better(report.Metric("", "", False), 10, 50) == 5

    def test_targets(self):
        verdicts = [(value, verdict) for _, value, verdict in report.judge(make_report())]
        assert verdicts == [("2.00", "met"), ("", "not measured"), ("1.00", "missed"), ("8.0", "met"), ("3.0", "met")]

    def test_targets_missed(self):
        verdicts = [verdict for _, _, verdict in report.judge(make_report(vllm=900.0, cold=10.1))]
        assert verdicts == ["missed", "not measured", "missed", "missed", "met"]

    def test_targets_are_for_bfloat16(self):
        assert report.judge(make_report(dtype="float32")) == []

    def test_table(self):
        heading, offline, *others = report.table(make_report())
        assert heading == ["", "jaxllm", "vLLM", "llama.cpp", "reference speed"]
        assert offline == ["offline, output tokens/s", "1,000", "500 (2x)", "", "2,959 (34%)"]
        cold = next(row for row in others if "empty caches" in row[0])
        assert cold[1:] == ["8", "100 (12x)", "1", ""]

    def test_share_of_the_reference_speed_is_of_each_round(self):
        made = make_report()
        made["reference_speed_rounds"] = [
            made["reference_speed_rounds"][0] | {"stream": speed} for speed in (100.0, 100.0, 100.0)
        ]
        stream = next(metric for metric in report.METRICS if metric.key == "stream")
        assert report.share(made, stream) == 0.5
        made["reference_speed_rounds"][0]["stream"] = 1000.0
        assert report.share(made, stream) == 0.1

    def test_text_is_aligned(self):
        lines = report.as_text([["a", "bb"], ["ccc", "d"]]).splitlines()
        assert lines == ["a    bb", "ccc   d"]

    def test_summary_has_all(self):
        text = report.summary(make_report())
        for words in ("2,959", "met ", "missed", "not measured", "20 GB/s read", "400 at 512"):
            assert words in text

    def test_readme(self, tmp_path: Path):
        readme = tmp_path / "README.md"
        readme.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\nafter\n")
        report.write_readme(readme, make_report(), "chart.png")
        first = readme.read_text()
        assert first.startswith("before\n\n" + report.BEGIN)
        assert first.endswith(report.END + "\nafter\n")
        assert "old" not in first
        assert "| offline, output tokens/s | 1,000 | 500 (2x) |  | 2,959 (34%) |" in first
        assert "(chart.png)" in first
        assert "caches, s: at most 10: met (8.0)\n" in first
        assert "times hf_static: not measured\n" in first
        assert all(len(line) <= 120 for line in first.splitlines())
        report.write_readme(readme, make_report(), "chart.png")
        assert readme.read_text() == first

    def test_readme_without_marks(self, tmp_path: Path):
        readme = tmp_path / "README.md"
        readme.write_text(report.BEGIN)
        with pytest.raises(BenchmarkError, match="has no lines"):
            report.write_readme(readme, make_report(), "chart.png")
        assert readme.read_text() == report.BEGIN


class TestWorkers:
    @pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
    def test_imports_its_own_library_only_and_runs_on_python_311(self, path: Path):
        tree = ast.parse(path.read_text(), feature_version=(3, 11))
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported = {module.partition(".")[0] for module in modules}
        assert imported - sys.stdlib_module_names - {"protocol", "pictures"} == OWN_LIBRARY[path.stem]

    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Return the files that are read before a start, here an environment of gigabytes."""
        read: list[Path] = []
        monkeypatch.setattr("peers.worker.read_files", lambda *paths: read.extend(paths))
        return read

    @pytest.fixture
    def worker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[Path]) -> Worker:
        program = (
            "import os, sys\n"
            f"sys.path.insert(0, {str(PROGRAMS)!r})\n"
            "from protocol import serve\n"
            "class Thing:\n"
            "    def __init__(self, settings): print('noise'); self.settings = settings\n"
            "    def add(self, a, b): print('noise'); return a + b\n"
            "    def get(self, name): return [self.settings, os.environ.get(name)]\n"
            "    def fail(self): raise RuntimeError('no more memory')\n"
            "    def close(self): open(os.environ['XDG_CACHE_HOME'] + '/closed', 'w')\n"
            "serve(Thing)\n"
        )
        (tmp_path / "thing.py").write_text(program)
        monkeypatch.setattr("peers.worker.PROGRAMS", tmp_path)
        monkeypatch.setenv("JAXLLM_CACHE", "elsewhere")
        return Worker("thing", sys.executable, {"a": 1}, tmp_path / "cache")

    def test_its_files_are_read_first(self, worker: Worker, read: list[Path], tmp_path: Path):
        with worker:
            assert read == [Path(sys.executable).parent.parent, tmp_path / "cache"]

    def test_reading_files_passes_over_what_cannot_be_read(self, tmp_path: Path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_bytes(b"x")
        (tmp_path / "folder" / "nowhere").symlink_to("missing")
        read_files(tmp_path, tmp_path / "missing")

    def test_calls(self, worker: Worker, tmp_path: Path):
        with worker:
            answer = worker.call("add", 2, 3)
            assert answer.value == 5
            assert 0 < answer.seconds < worker.seconds_to(answer) < 60
            assert 2**20 < answer.peak_bytes < 2**30
            assert worker.call("get", "JAXLLM_CACHE").value == [{"a": 1}, None]
            assert worker.call("get", "XDG_CACHE_HOME").value[1] == str(tmp_path / "cache")
        assert (tmp_path / "cache" / "closed").exists()

    def test_death_says_why(self, worker: Worker):
        with worker, pytest.raises(BenchmarkError, match="no more memory"):
            worker.call("fail")

    def test_an_error_here_ends_it(self, worker: Worker, tmp_path: Path):
        pid = worker._process.pid
        with pytest.raises(ZeroDivisionError), worker:
            raise ZeroDivisionError
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert not (tmp_path / "cache" / "closed").exists()

    def test_memory_of_children_counts(self, tmp_path: Path):
        program = (
            "import subprocess, sys\n"
            f"sys.path.insert(0, {str(PROGRAMS)!r})\n"
            "from protocol import peak_bytes\n"
            "alone = peak_bytes()\n"
            "hold = 'x = bytearray(2**27); print(flush=True); input()'\n"
            "child = subprocess.Popen([sys.executable, '-c', hold], stdin=-1, stdout=-1)\n"
            "child.stdout.readline()\n"
            "print(peak_bytes() - alone)\n"
            "child.communicate(b'\\n')\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert 2**27 < int(done.stdout) < 2**28


class TestCommandLine:
    def test_no_paths_of_this_machine_are_kept(self):
        words = [
            "--hf-python",
            "/somewhere/python",
            "--model",
            "/somewhere/m.gguf",
            "--out",
            "/somewhere",
            "--rounds",
            "2",
        ]
        described = benchmark.describe(benchmark.make_parser().parse_args(words))
        assert "somewhere" not in json.dumps(described)
        assert described["command"] == "scripts/benchmark.py --hf-python PATH --dtype bfloat16 --rounds 2"
        assert described["settings"]["model"] == "m.gguf"

    def test_charts_are_asked_for_before_anything_is_measured(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(sys, "argv", ["benchmark.py"])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("measured"))
        assert benchmark.main() == 1
        assert "pip install -e '.[benchmark]'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("mode", "figures"),
        [
            ("sweep", {"batch": [{"batch": 1, "step_ms": 2.5}], "depth": [{"depth": 2, "cold_s": 3.5}]}),
            ("workloads", {"chats": {"on_s": 2.5, "off_s": 3.5}}),
        ],
    )
    def test_other_modes_in_words(self, mode: str, figures: dict[str, Any]):
        words = benchmark.in_words({mode: figures}, mode)
        assert "2.5" in words
        assert "3.5" in words


class Recorder:
    """Stands in for a Session: remembers the prompts and answers with the sum of each prompt's tokens."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def generate(self, prompts: list[list[int]], length: int) -> list[list[int]]:
        self.calls.append([list(prompt) for prompt in prompts])
        return [[sum(prompt)] * length for prompt in prompts]


def test_shared_system_prompt():
    recorder: Any = Recorder()
    caching.shared_system_prompt(recorder, Source(1000), quick=False)
    [prompts] = recorder.calls
    assert len(prompts) == 256
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:528]) for prompt in prompts}) == 256


def test_chats_carry_the_answers_on():
    recorder: Any = Recorder()
    caching.chat(recorder, Source(1000), quick=False)
    assert [len(turn) for turn in recorder.calls] == [8] * 6
    for before, after in zip(recorder.calls, recorder.calls[1:], strict=False):
        for old, new in zip(before, after, strict=True):
            assert new[: len(old)] == old
            assert new[len(old) : len(old) + 32] == [sum(old)] * 32
            assert len(new) == len(old) + 32 + 48


def test_questions_on_one_document():
    recorder: Any = Recorder()
    caching.long_document(recorder, Source(1000), quick=False)
    assert len(recorder.calls) == 4
    assert len({tuple(prompt[:8000]) for [prompt] in recorder.calls}) == 1


@pytest.mark.parametrize("width", sweep.POINTS["width"])
def test_wider_models_divide(width: int):
    config = sweep.wider(width)
    assert config["num_attention_heads"] * config["head_dim"] == width
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_hidden_layers"] == sweep.WIDTH_LAYERS


def test_deeper_models_differ_in_depth_only():
    assert sweep.deeper(64) == sweep.SHAPE | {"num_hidden_layers": 64}


def test_decode_step_is_what_more_tokens_cost():
    class Clock(FakeProcess):
        def call(self, method: str, *arguments: Any) -> Answer:
            _, lengths = arguments
            return Answer([[7] * length for length in lengths], 2.0 + 0.25 * (lengths[0] - 1), 0.0, 0)

    assert sweep.decode(Clock(), Source(1000), 4, 8, 9) == pytest.approx((2.0, 0.25))


def test_our_own_worker(monkeypatch: pytest.MonkeyPatch):
    """The worker runs with the installed library on a tiny model."""
    monkeypatch.syspath_prepend(PROGRAMS)
    limits = {"skip_tokenizer_init": True, "max_num_batched_tokens": 8, "max_num_seqs": 8, "enforce_eager": True}
    settings = {"library": "jaxllm", "model": str(folder("llama3_tied")), "dtype": "float32", "engine": limits}
    engine = import_module("vllm_api").Engine(settings)
    assert engine.versions()["jaxllm"] == jaxllm.__version__
    [tokens] = engine.generate([[1, 2, 3]], [4])
    [scored] = engine.reference([[1, 2, 3]], [4], top=2)
    assert [token for token, _ in scored] == tokens
    assert all(len(likeliest) == 2 for _, likeliest in scored)
    hf = json.loads((folder("llama3_tied") / "config.json").read_text())
    shapes = engine.shapes()
    assert (shapes["vocab_size"], shapes["num_layers"]) == (hf["vocab_size"], hf["num_hidden_layers"])
    engine.llm.shutdown()


def test_who_is_compared(tmp_path: Path):
    peers = contestants.peers(tmp_path, tmp_path / "m.Q4_1.gguf", "float32", vllm="v", hf="h", llamacpp="l")
    assert [(each.name, each.python) for each in peers] == [
        ("vllm", "v"), ("hf_static", "h"), ("hf_continuous", "h"), ("llamacpp", "l"),
    ]  # fmt: skip
    assert [each.label for each in peers if not each.shares_weights] == ["llama.cpp, Q4_1"]
    assert contestants.peers(tmp_path, tmp_path, "float32", vllm=None, hf=None, llamacpp=None) == []


def test_charts_draw_what_the_sweep_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(contestants.Contestant, "start", lambda self, cache: EchoWorker())
    kept: list[int] = []
    rows = sweep.sweep(
        tmp_path, "bfloat16", quick=True, scratch=tmp_path, keep=lambda rows: kept.append(sum(map(len, rows.values())))
    )
    assert kept == list(range(1, 1 + sum(map(len, rows.values())))), "a run that is cut off keeps what it measured"
    assert list(rows) == ["prompts", "batch", "context", "depth", "width"]
    for name, labels in charts.GROWTH.items():
        assert {name, *labels} <= set(rows[name][0])


class SizedWorker(EchoWorker):
    """Knows the model's sizes, too."""

    def call(self, method: str, *arguments: Any) -> Answer:
        return Answer(SHAPES, 0.0, 20.0, 2**30) if method == "shapes" else super().call(method, *arguments)


def test_both_backends_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """If plain XLA takes twice as long for each token, its figures are half of ours."""

    class Backend(SizedWorker):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def call(self, method: str, *arguments: Any) -> Answer:
            answer = super().call(method, *arguments)
            return replace(answer, seconds=answer.seconds * (2 if self.name == "xla" else 1))

    started: list[str] = []
    monkeypatch.setattr(
        contestants.Contestant, "start", lambda self, cache: started.append(self.name) or Backend(self.name)
    )
    figures = beside.beside_xla(tmp_path, "float32", rounds=2, quick=True, scratch=tmp_path)
    kernels, xla = "own kernels", "xla"
    assert started == [kernels, xla, kernels, xla, xla, kernels]
    assert figures.pop("a prompt of 512, tokens/s") == {kernels: 51200.0, xla: 25600.0, "times": 2.0}
    assert figures.pop("starts to a first token, 1/s")["times"] == 1.0
    assert len(figures) == 4
    assert all(row == {kernels: 100.0, xla: 50.0, "times": 2.0} for row in figures.values())


def test_another_revision_runs_from_its_own_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path):
    trees: dict[str, Path] = {}

    def start(self: contestants.Contestant, cache: Path) -> EchoWorker:
        trees[self.name] = self.tree
        assert (self.tree / "jaxllm" / "__init__.py").is_file()
        return SizedWorker()

    monkeypatch.setattr(contestants.Contestant, "start", start)
    figures = beside.beside_revision(tmp_path, "float32", "HEAD", rounds=1, quick=True, scratch=tmp_path)
    assert all(row["times"] == 1.0 for row in figures.values())
    assert trees == {"this tree": repository, "HEAD": tmp_path / "tree"}
    assert not trees["HEAD"].exists()
    with pytest.raises(BenchmarkError, match="git cannot check out 'no-such-revision'"):
        beside.beside_revision(tmp_path, "float32", "no-such-revision", rounds=1, quick=True, scratch=tmp_path)


def test_a_worker_imports_the_checkout_it_is_told(tmp_path: Path):
    assert environment(sys.executable, tmp_path, tmp_path / "tree")["PYTHONPATH"] == str(tmp_path / "tree")

"""`jaxllm check`: exit statuses, and what goes to standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.check.report import Figures, GroupReport, MemoryReport, Report
from jaxllm.cli import check
from jaxllm.cli.main import main
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.utils.child_process import ChildError

REPORT: dict[str, Any] = {
    "model": "org/name", "architecture": "LlamaForCausalLM", "topology": "v5e:2x2", "num_devices": 4,
    "tensor_parallel_size": 2, "versions": {"jax": "1.2"},
    "hardware": Figures(
        device_kind="TPU v5 lite", memory_bytes=10, usable_bytes=10, bytes_per_second=1e9, flops_per_second=1e12
    ),
    "engine": {"block_size": 64},
    "memory": MemoryReport(
        limit=9, params=3, scratch=1, num_blocks=2, kv_cache=4, replicated_params=[], state_slots=3, state_slot=1,
        groups=[GroupReport(num_layers=2, window=None, attention_chunk=None, num_blocks=2, block=2)],
    ),
}  # fmt: skip


class Asked:
    """Stands in for the process that compiles."""

    def __init__(self, *, fits: bool = True) -> None:
        self.report = Report(**REPORT, fits=fits, reason=None if fits else "too large")
        self.args: EngineArgs | None = None

    def __call__(self, args: EngineArgs, topology: str) -> Report:
        assert topology == "v5e:2x2"
        self.args = args
        return self.report


def test_flags_are_the_engines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked = Asked()
    monkeypatch.setattr(check, "ask", asked)
    flags = ["--max-model-len", "4K", "--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8", "--dtype", "bfloat16"]
    assert main(["check", "org/name", "--topology", "v5e:2x2", *flags]) == 0
    expected = {"max_model_len": 4096, "tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    assert asked.args == EngineArgs(model="org/name", **expected)
    assert capsys.readouterr().out.startswith("FITS: org/name (LlamaForCausalLM) on v5e:2x2, 2 of 4 devices")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(check, "ask", Asked(fits=False))
    assert main(["check", "org/name", "--topology", "v5e:2x2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["fits"], document["reason"], document["memory"]["params"]) == (False, "too large", 3)


def test_a_config_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = Asked()
    monkeypatch.setattr(check, "ask", asked)
    file = tmp_path / "check.yaml"
    file.write_text("topology: v5e:2x2\nmax-num-seqs: 8\n")
    assert main(["check", "org/name", "--config", str(file)]) == 0
    assert asked.args is not None
    assert asked.args.max_num_seqs == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "v5e:2x2"], "say which MODEL"),
        (["org/name"], "say which --topology"),
        (
            ["org/name", "--topology", "v9:1x1"],
            "topology='v9:1x1' is not known. Did you mean 'v6e:1x1'? Known are v4:2x2x1",
        ),
        (["org/name", "--topology", "h100", "--tensor-parallel-size", "2"], "more than the 1 devices of h100"),
        (["org/name", "--topology", "h100", "--pipeline-parallel-size", "2"], "pipeline_parallel_size=2"),
        (["org/name", "--topology", "h100", "--block-size", "7"], "block_size"),
    ],
)
def test_misuse(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert said in output.err


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def ask(*_: Any) -> Report:
        raise ChildError("jaxllm.check ended with status 1")

    monkeypatch.setattr(check, "ask", ask)
    assert main(["check", "org/name", "--topology", "v5e:2x2"]) == 3
    assert "compiling for v5e:2x2 failed" in capsys.readouterr().err

"""`jaxllm collect-env` says what a bug report needs, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxllm
from jaxllm.cli import collect_env
from jaxllm.cli.main import main


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("JAXLLM_CACHE", "some-folder")
    monkeypatch.setenv("UNRELATED_SETTING", "1")
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    facts = dict(line.split(": ", 1) for line in shown.splitlines())
    assert facts["jaxllm"] == jaxllm.__version__
    assert facts["backend"] == "cpu"
    assert facts["cache"] == "some-folder"
    assert facts["env HF_TOKEN"] == "(hidden)"
    assert facts["torch"] == "not installed"
    for name in ("python", "platform", "cpu", "memory", "jax", "jaxlib", "flax", "numpy", "transformers", "device 0"):
        assert facts[name]
    assert "hf_secret" not in shown
    assert "UNRELATED" not in shown


def test_cpu_description(tmp_path: Path):
    cpuinfo, meminfo = tmp_path / "cpuinfo", tmp_path / "meminfo"
    cpuinfo.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n")
    meminfo.write_text("MemTotal:       16777216 kB\n")
    facts = dict(collect_env._cpu(cpuinfo, meminfo))
    assert facts["cpu"].startswith("Some CPU, ")
    assert facts["cpu flags"] == "avx2 amx_bf16"
    assert facts["memory"] == "16.0 GiB"
    assert dict(collect_env._cpu(tmp_path / "none", meminfo))["memory"] == "unknown"

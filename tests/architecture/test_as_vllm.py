"""Programs that import vLLM run on jaxllm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jaxllm.as_vllm import VLLM_VERSION
from tests.architecture.sources import ROOT

PROGRAM = """
import sys
from importlib.metadata import version
from importlib.util import find_spec

import vllm
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

import jaxllm
import jaxllm.lora.request

assert find_spec("vllm") is not None and find_spec("vllm.model_executor") is None
assert vllm is jaxllm and vllm.SamplingParams is SamplingParams
assert LoRARequest is jaxllm.lora.request.LoRARequest and LoRARequest.__module__ == "jaxllm.lora.request"
assert jaxllm.lora.request.__spec__.name == "jaxllm.lora.request"
try:
    import vllm.model_executor
except ModuleNotFoundError as error:
    print(error)
print(version("vllm"), __name__, sys.argv[1:])
"""


def run(*words: str) -> str:
    command = [sys.executable, "-W", "error", "-m", "jaxllm.as_vllm", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_a_program_of_vllm_gets_jaxllm(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    expected = ["No module named 'vllm.model_executor'", f"{VLLM_VERSION} __main__ ['--flag', 'x']"]
    assert run(str(program), "--flag", "x").splitlines() == expected


def test_a_program_finds_the_modules_beside_it(tmp_path: Path):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    program = tmp_path / "program.py"
    program.write_text("import beside, vllm; print(beside.WORD, vllm.__name__)")
    assert run(str(program)).strip() == "found jaxllm"


def test_a_module_runs_with_its_own_arguments():
    assert (
        run("-m", "platform", "terse").strip()
        == subprocess.check_output([sys.executable, "-m", "platform", "terse"], text=True).strip()
    )

"""README's example of an asynchronous engine runs unchanged, over a core without a model."""

from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.architecture.sources import ROOT
from tests.async_engine.support import mock_llm, tiny_args

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_example_prints_both_answers(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "AsyncLLM" in block]
    program = tmp_path / "example.py"
    program.write_text(example, encoding="utf-8")
    with contextlib.ExitStack() as stack:

        def start(args: AsyncEngineArgs) -> AsyncLLM:
            assert args == AsyncEngineArgs(model=MODEL)
            return stack.enter_context(mock_llm(tiny_args(tokenizer)))

        monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
        runpy.run_path(str(program))
    answers = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("one ", "two "))]
    assert sorted(line.split()[0] for line in answers) == ["one", "two"]

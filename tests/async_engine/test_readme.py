"""README's example of an asynchronous engine runs unchanged, except for the model's name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.architecture.sources import ROOT
from tests.e2e.tiny_engine import CASE
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder
from tests.quick import QUICK_FLAGS

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_example_prints_both_answers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder(CASE), model)
    save_tokenizer(model)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "AsyncLLM" in block]
    assert MODEL in example
    program = tmp_path / "example.py"
    program.write_text(example.replace(MODEL, str(model)), encoding="utf-8")
    env = os.environ | {"XLA_FLAGS": QUICK_FLAGS}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines() if line.startswith(("one ", "two "))) == [
        "one",
        "two",
    ]

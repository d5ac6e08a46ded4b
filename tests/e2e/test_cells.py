"""A cell of a notebook that makes an engine, run again and again, keeps the memory of one engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is looked at")]

CELLS = """
import sys, threading, time, psutil
from jaxllm import LLM, SamplingParams

def is_alone(): return not any(each.name == "jaxllm-compile" for each in threading.enumerate())

most = 0
for cell in range(6):
    llm = LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_model_len=32, max_num_seqs=8)
    llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=4), use_tqdm=False)
    most = max(most, sum(each.name == "jaxllm-compile" for each in threading.enumerate()))
    if cell == 0:
        first = psutil.Process().memory_info().rss
llm = None
deadline = time.monotonic() + 60
while not is_alone() and time.monotonic() < deadline:
    time.sleep(0.05)
print(most, is_alone(), (psutil.Process().memory_info().rss - first) >> 20)
"""


def test_cells_of_dropped_engines(tmp_path: Path, repository: Path) -> None:
    """Nothing is kept on disk, so that every engine is dropped while it compiles."""
    environment = {**os.environ, "PYTHONPATH": str(repository), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    model = repository / "tests" / "data" / "tiny" / "llama3_tied"
    done = subprocess.run(
        [sys.executable, "-c", CELLS, str(model)], env=environment, check=True, capture_output=True, text=True
    )
    most, is_alone, grown = done.stdout.split()
    assert int(most) <= 4, "one compiles, one ends, and one or two wait for it"
    assert is_alone == "True"
    assert int(grown) < 100

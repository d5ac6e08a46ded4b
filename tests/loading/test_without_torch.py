"""PyTorch stays out even where it is installed: importing it would take seconds and a gigabyte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>", "c"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 4,
    "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
PROGRAM = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is not None
import jaxllm.cli.main, jaxllm.engine.core.startup, jaxllm.llm
from jaxllm.loading.open import open_checkpoint
tokenizer = open_checkpoint(sys.argv[1]).tokenizer()
assert tokenizer("abc")["input_ids"] == [2, 5]
chat = [{"role": "user", "content": "ab"}]
assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab"
from transformers.utils import is_torch_available
assert is_torch_available()  # transformers would take it
assert "torch" not in sys.modules
"""


@pytest.mark.loading
def test_torch_is_not_imported_where_it_is_installed(tmp_path: Path, repository: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "torch-99.0.dist-info").mkdir()
    (tmp_path / "torch-99.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    model = tmp_path / "x.gguf"
    model.write_bytes(gguf_bytes(llama_metadata() | TOKENIZER, gguf_f32({"token_embd.weight": np.ones((6, 8))})))
    path = os.pathsep.join([str(tmp_path), str(repository)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

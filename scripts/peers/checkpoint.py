"""Make of a GGUF file the bfloat16 checkpoint that jaxllm, vLLM and HF can all read."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from fetch_models import default_dir

from peers.worker import PROGRAMS, BenchmarkError


def checkpoint(model: Path, hf_python: str | None) -> Path:
    """Return the folder that all can read, made of a GGUF file once; the file itself without HF to make it."""
    if model.is_dir():
        return model
    folder = default_dir() / f"{model.stem}-bfloat16"
    if folder.is_dir():
        return folder
    if not hf_python:
        return model
    print(f"writing {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as scratch:
        command = [hf_python, str(PROGRAMS / "save_checkpoint.py"), str(model.resolve()), f"{scratch}/saved"]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise BenchmarkError(f"{hf_python} could not save {model.name} as safetensors:\n{done.stderr}")
        Path(scratch, "saved").rename(folder)
    return folder

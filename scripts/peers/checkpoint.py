"""Convert a GGUF file to a bfloat16 checkpoint that jaxllm, vLLM and HF can all read."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from fetch_models import default_dir

from peers.worker import PROGRAMS, BenchmarkError


def checkpoint(model: Path, hf_python: str | None) -> Path:
    """Return the folder of a GGUF file's checkpoint, made once with HF's Python; without that Python, the file."""
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

"""The memory that a model takes: an estimate before it is loaded, and what its processes have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.split_files import part_names
from jaxllm.loading.open import local_path
from jaxllm.resolve.async_engine_args import AsyncEngineArgs

PROCESS_BYTES = 300 * 2**20
"""The memory of an engine besides weights and KV cache: Python, JAX, programs, and the scratch of a step. On a CPU
all-MiniLM takes 60 MiB of it, SmolLM2 340 MiB and Gemma 3 270M, with logits of 262,144 tokens, 520 MiB: what a process
is seen to take replaces the estimate."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
"""The endings of files with weights; a folder with some of several kinds is read in the first."""


def weight_bytes(engine_args: AsyncEngineArgs) -> int | None:
    """Return the size of a model's files with weights, None if they are not on this machine."""
    try:
        path = local_path(engine_args.model)
    except VLLMValidationError:
        return None
    if path is None:
        path = _cached(engine_args)
    if path is None:
        return None
    if path.is_file():
        return _total(path.with_name(name) for name in part_names(path.name))
    for suffix in _SUFFIXES:
        if size := _total(each for each in path.iterdir() if each.suffix == suffix):
            return size
    return None


def memory_bytes(engine_args: AsyncEngineArgs, num_weight_bytes: int | None) -> int | None:
    """Return the memory that a loaded model takes with weights of this size; None without its KV cache's size."""
    if num_weight_bytes is None or engine_args.kv_cache_memory_bytes is None:
        return None
    return num_weight_bytes + engine_args.kv_cache_memory_bytes + PROCESS_BYTES


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the memory that processes have for themselves: resident pages that are of no file. 0 where the system
    does not tell.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
            total += (int(fields[1]) - int(fields[2])) * _PAGE_BYTES
    return total


def _cached(engine_args: AsyncEngineArgs) -> Path | None:
    """Return the newest revision of a hub's model in the cache; None for one file of many, or if there is none."""
    from huggingface_hub import constants

    repository, _, quant = engine_args.model.partition(":")
    folder = Path(engine_args.download_dir or constants.HF_HUB_CACHE).expanduser()
    snapshots = folder / f"models--{repository.replace('/', '--')}" / "snapshots"
    if quant or not snapshots.is_dir():
        return None
    return max(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, default=None)


def _total(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())

"""Compile Mosaic GPU kernels for an H100 that is not there, and read ptxas' messages.

Set the environment before importing this: Mosaic GPU reads it when it is loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.experimental.mosaic.gpu import core as mosaic_gpu

FIRST_PTXAS = (13, 3)
"""Earlier versions of ptxas may overwrite registers that an asynchronous wgmma still reads."""


def ptxas_version() -> tuple[int, ...]:
    """Return the version of the ptxas that Mosaic GPU will find."""
    printed = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", printed)
    if release is None:
        raise SystemExit("ptxas does not say its version")
    return tuple(map(int, release.groups()))


@contextmanager
def noted_smem() -> Iterator[dict[str, int]]:
    """Yield a dict that gets the dynamic shared memory of each lowered kernel, which ptxas does not report."""
    sizes: dict[str, int] = {}
    original = mosaic_gpu._lower_as_gpu_kernel

    def noted(*args: Any, **settings: Any) -> Any:
        sizes[settings["kernel_name"]] = mosaic_gpu._smem_tree_size(settings["smem_scratch_shape"])
        return original(*args, **settings)

    mosaic_gpu._lower_as_gpu_kernel = noted
    try:
        yield sizes
    finally:
        mosaic_gpu._lower_as_gpu_kernel = original


@contextmanager
def captured_output() -> Iterator[list[str]]:
    """Yield a list that gets the output of native code."""
    captured: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in enumerate(saved, 1):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            captured.append(file.read().decode(errors="replace"))


def read_ptxas(text: str) -> dict[str, tuple[int, int]]:
    """Return registers and bytes spilled of each kernel in ptxas' messages."""
    figures = {}
    for part in text.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")].removesuffix("_mosaic_gpu_kernel")
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", part)))
        registers = re.search(r"Used (\d+) registers", part)
        if registers is None:
            raise ValueError(f"ptxas says nothing of {name}'s registers")
        figures[name] = (int(registers[1]), spilled)
    return figures

"""Check the ptxas that compiles the kernels on this machine: old versions miscompile them."""

from __future__ import annotations

from typing import Any

_FIRST_ISA = 93
"""PTX 9.3, of CUDA 13.3."""


def assembler_doubt() -> str | None:
    """Return what is wrong with the ptxas that Mosaic GPU finds, or None if nothing is known."""
    isa = _isa_version()
    if isa is None or isa >= _FIRST_ISA:
        return None
    return (
        f"the ptxas that is found first is of PTX {isa // 10}.{isa % 10}, and before 9.3 (CUDA 13.3) it may overwrite "
        "registers that a matmul still reads; install nvidia-cuda-nvcc>=13.3 and put its bin folder first in PATH"
    )


def _isa_version() -> int | None:
    try:
        from jax._src.lib import mosaic_gpu

        extension: Any = vars(mosaic_gpu)["_mosaic_gpu_ext"]
        return int(extension._get_ptxas_isa_version())
    except (ImportError, AttributeError, KeyError, RuntimeError):
        return None  # no public function tells

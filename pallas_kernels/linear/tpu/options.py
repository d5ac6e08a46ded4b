"""The compiler options of the TPU's kernels."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import tpu as pltpu

from .sizes import VMEM_LIMIT


def pallas_options(interpret: bool) -> dict[str, Any]:
    """Return arguments of `pallas_call`."""
    if interpret:
        return {"interpret": pltpu.InterpretParams()}
    return {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT)}

"""LoRA on a CPU: only each row's own adapter is read and multiplied, and the sum is updated in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..rows import Rows
from ..shape import LoraShape
from .kind import COLUMNS, MAX_COLUMNS, STEP_BYTES, Kind


def cpu_refusal(shape: LoraShape) -> str | None:
    """Return why there is no kernel for adapters, or None if there is."""
    dtype, out_dtype = jnp.dtype(shape.dtype), jnp.dtype(shape.out_dtype)
    if not {dtype, out_dtype} <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        return f"dtypes must be bfloat16 or float32, not {dtype.name} to {out_dtype.name}"
    if shape.num_inputs * dtype.itemsize % STEP_BYTES:
        return f"a row of A must be a multiple of {STEP_BYTES} bytes, not {shape.num_inputs} numbers"
    if shape.rank % COLUMNS or shape.rank * len(shape.parts) > MAX_COLUMNS:
        return f"the rank must be a multiple of {COLUMNS}, and of all parts at most {MAX_COLUMNS}, not {shape.rank}"
    return None


def cpu_prepare(shape: LoraShape, folder: Path | None) -> None:
    """Compile both kernels: one that adds to an array, and one that begins with zeros."""
    for adds in (True, False):
        _prepare(Kind(shape.dtype, shape.out_dtype, adds), folder)


def cpu_lora(
    x_ti: Array,
    down_lci: Array,
    up_lco: Array,
    layer: Array | int,
    rows: Rows,
    parts: Sequence[int],
    num_slots: int,
    *,
    plus_to: Array | None = None,
    out_dtype: DTypeLike,
) -> Array:
    """See `Lora`. Without `plus_to` a row of slot 0 is -0: a number added to it stays the same to the bit."""
    kind = Kind(x_ti.dtype, out_dtype, plus_to is not None)
    out = jax.ShapeDtypeStruct((x_ti.shape[0], up_lco.shape[2]), out_dtype)
    by_slot = (each.reshape(each.shape[0], num_slots, -1, each.shape[2]) for each in (down_lci, up_lco))
    stops = jnp.asarray(list(accumulate(parts)), jnp.int32)
    operands = [x_ti, *by_slot, jnp.asarray(layer, jnp.int32), rows.sorted_t, rows.order_t, rows.num_adapted, stops]
    aliases = {} if plus_to is None else {len(operands): 0}
    call = jax.ffi.ffi_call(_prepare(kind, None), out, input_output_aliases=aliases)
    return call(*operands, *([] if plus_to is None else [plus_to]))


def _prepare(kind: Kind, folder: Path | None) -> str:
    """Compile the kernel and return XLA's name for it."""
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    return register(kind.name, Kernel(kind), folder)

"""The matmul on a CPU: fast for few rows, with the same bits for any number of rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

from ..shape import ACTIVATIONS, LinearShape
from .kind import DTYPES, MIN_COLUMNS, MIN_GATES, MIN_ROWS, STEP_BYTES, Kind, can_unpack
from .rounding import rounding_refusal

__all__ = [
    "Kind",
    "arrays_of",
    "can_multiply",
    "cpu_int8_linear",
    "cpu_int8_prepare",
    "cpu_linear",
    "cpu_prepare",
    "cpu_refusal",
    "dtype_refusal",
    "rounding_refusal",
]


def can_multiply(
    shape: tuple[int, int],
    dtype: DTypeLike,
    activation: str | None = None,
    *,
    is_gated: bool = True,
    form: WeightFormat | None = None,
) -> bool:
    """Return whether there is a kernel for x of a dtype, weights [n, k] of it or of a format, and an activation."""
    (n, k), dtype = shape, jnp.dtype(dtype)
    has_rows = n >= MIN_COLUMNS and activation in (None, *ACTIVATIONS)
    if activation is not None and is_gated:
        has_rows = has_rows and n % 2 == 0 and n >= 2 * MIN_GATES
    has_steps = dtype in DTYPES and k * dtype.itemsize % STEP_BYTES == 0
    if form is not None and (not can_unpack(form, k) or (form.is_half and dtype != jnp.float32)):
        return False
    return has_rows and has_steps


def dtype_refusal(dtype: DTypeLike, out_dtype: DTypeLike) -> str | None:
    """Return why there is no kernel for x and a result of these dtypes, or None if there may be."""
    dtype, out_dtype = jnp.dtype(dtype), jnp.dtype(out_dtype)
    if {dtype, out_dtype} <= {*DTYPES}:
        return None
    return f"dtypes must be bfloat16 or float32, not {dtype.name} to {out_dtype.name}"


def cpu_refusal(shape: LinearShape) -> str | None:
    """Return why there is no kernel for a matmul, or None if there is."""
    if reason := dtype_refusal(shape.dtype, shape.out_dtype):
        return reason
    size = (shape.num_outputs, shape.num_inputs)
    if can_multiply(size, shape.dtype, shape.activation, is_gated=shape.is_gated, form=shape.format):
        return None
    return (
        "a row of weights must be a multiple of 64 bytes in x's dtype, or of 64 numbers if quantized, x must be "
        f"float32 for weights of 16 bits, and there must be {MIN_COLUMNS} rows, or {2 * MIN_GATES} with gates, "
        f"not {list(size)}"
    )


def cpu_prepare(shape: LinearShape, folder: Path | None, *, rounds: bool = False) -> None:
    """Compile the kernel of a matmul, kept in a folder."""
    _prepare(_kind(shape, rounds=rounds), folder)


cpu_int8_prepare = partial(cpu_prepare, rounds=True)


def cpu_linear(
    x_ti: Array,
    weight: Array | Quantized,
    layer: Array | int,
    *,
    out_dtype: DTypeLike,
    num_rows: Array | int | None = None,
    activation: str | None = None,
    is_gated: bool = True,
    plus_to: Array | None = None,
    bias_o: Array | None = None,
    interpret: bool = False,
    rounds: bool = False,
) -> Array:
    """See `Linear`; there is nothing to interpret. No row depends on the others.

    With `rounds`, rows of x are rounded to 8 bits where `rounding_refusal` returns None. Otherwise the result has the
    bits of a product with the numbers that quantized weights represent, rounded to x's dtype; where all numbers of a
    row share a scale, it multiplies the sums. Rows from `num_rows` on become 0, or their product.
    """
    del interpret
    codes, *others = arrays_of(weight)
    t, n, k = x_ti.shape[0], codes.shape[1], weight.shape[2]
    form = weight.format if isinstance(weight, Quantized) else None
    shape = LinearShape(n, k, x_ti.dtype, out_dtype, form, activation, is_gated)
    kind = _kind(shape, rounds=rounds)
    padding = 0 if kind.rounds else max(0, MIN_ROWS - t)
    results = [jax.ShapeDtypeStruct((t + padding, shape.num_columns), out_dtype)]
    if kind.rounds:
        results.append(_scratch(kind, t, k))
    call = jax.ffi.ffi_call(_prepare(kind, None), results)
    numbers = (jnp.asarray(number, jnp.int32) for number in (layer, t if num_rows is None else num_rows))

    def pad(rows: Array) -> Array:
        return jnp.pad(rows, ((0, padding), (0, 0)))

    plus = jnp.zeros((0, n), out_dtype) if plus_to is None else pad(plus_to)
    bias = jnp.zeros(0, out_dtype) if bias_o is None else bias_o
    return call(pad(x_ti), codes, *numbers, plus, bias, *others)[0][:t]


cpu_int8_linear = partial(cpu_linear, rounds=True)


def arrays_of(weight: Array | Quantized) -> list[Array]:
    """Return the arrays of weights as kernels take them, the codes first.

    Raises:
      ValueError: for codes that are not packed although several fit into a byte.
    """
    if not isinstance(weight, Quantized):
        return [weight]
    if weight.format.is_packed and not weight.is_packed:
        raise ValueError(f"a CPU's kernels take codes of {weight.format.bits} bits packed (Quantized.is_packed)")
    return [weight.parts[name] for name in weight.format.parts]


def _kind(shape: LinearShape, *, rounds: bool) -> Kind:
    rounds = rounds and rounding_refusal(shape) is None
    return Kind(shape.dtype, shape.format, shape.out_dtype, shape.activation, shape.is_gated, rounds)


def _scratch(kind: Kind, num_rows: int, k: int) -> jax.ShapeDtypeStruct:
    """Return the memory that a call needs besides its operands."""
    from .rounded import RoundedMultiplier

    return jax.ShapeDtypeStruct((RoundedMultiplier(kind).scratch_bytes(num_rows, k),), jnp.uint8)


def _prepare(kind: Kind, folder: Path | None) -> str:
    """Compile the kernel and return XLA's name for it."""
    from pallas_kernels.native.compiling import register

    from .kernel import Kernel

    return register(kind.name, Kernel(kind), folder)

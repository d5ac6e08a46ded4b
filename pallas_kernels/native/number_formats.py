"""Number formats: how stored numbers become float32, and how float32 is rounded to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from .emitter import F16, F32, I8, I16, I32, Emitter, vector


class Format(NamedTuple):
    """The format of one dtype."""

    storage: ir.Type
    num_bytes: int
    widen: Callable[[Emitter, Any], Any]
    """A function that widens stored numbers, one or a vector, to float32."""
    narrow: Callable[[Emitter, Any], Any] | None
    """A function that rounds float32 to stored numbers; None for dtypes that kernels only read."""


def _like(value: Any, element: ir.Type) -> ir.Type:
    return vector(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _widen_bfloat16(e: Emitter, x: Any) -> Any:
    x = e.ir.zext(x, _like(x, I32))
    return e.ir.bitcast(e.ir.shl(x, e.constant(16, x)), _like(x, F32))


def _narrow_bfloat16(e: Emitter, x: Any) -> Any:
    bits = e.ir.bitcast(x, _like(x, I32))
    is_odd = e.ir.and_(e.ir.lshr(bits, e.constant(16, bits)), e.constant(1, bits))
    bits = e.ir.add(bits, e.ir.add(is_odd, e.constant(0x7FFF, bits)))  # half to even
    return e.ir.trunc(e.ir.lshr(bits, e.constant(16, bits)), _like(x, I16))


def _widen_e5m2(e: Emitter, x: Any) -> Any:
    x = e.ir.zext(x, _like(x, I16))
    return e.ir.fpext(e.ir.bitcast(e.ir.shl(x, e.constant(8, x)), _like(x, F16)), _like(x, F32))


def _widen_e4m3(e: Emitter, x: Any) -> Any:
    # With the exponent and mantissa of a float16, which unlike float32 keeps its denormals here, the number is 2**-8
    # times as large. A pool holds no NaN.
    x = e.ir.zext(x, _like(x, I16))
    sign = e.ir.shl(e.ir.and_(x, e.constant(0x80, x)), e.constant(8, x))
    rest = e.ir.shl(e.ir.and_(x, e.constant(0x7F, x)), e.constant(7, x))
    value = e.ir.fpext(e.ir.bitcast(e.ir.or_(sign, rest), _like(x, F16)), _like(x, F32))
    return e.ir.fmul(value, e.constant(2.0**8, value))


FORMATS: dict[Any, Format] = {
    jnp.dtype(jnp.float32): Format(F32, 4, lambda _, x: x, lambda _, x: x),
    jnp.dtype(jnp.float16): Format(F16, 2, lambda e, x: e.ir.fpext(x, _like(x, F32)), None),
    jnp.dtype(jnp.bfloat16): Format(I16, 2, _widen_bfloat16, _narrow_bfloat16),
    jnp.dtype(jnp.float8_e5m2): Format(I8, 1, _widen_e5m2, None),
    jnp.dtype(jnp.float8_e4m3fn): Format(I8, 1, _widen_e4m3, None),
}

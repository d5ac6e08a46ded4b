"""Instructions on registers of 32 bits: two bfloat16 numbers, four bytes or a float32.

`EmittedRegisters` writes them as PTX. `EmulatedRegisters` computes the same with arrays, for the interpreter.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu.fragmented_array import ir, llvm

_HALF = 0xFFFF
_TINY_UNIT = 100
"""Tiny numbers are multiplied by 2 to this power before anything else is done with them in float32."""


class Registers(Protocol):
    """The instructions; registers are int32 arrays, or values of a program under construction."""

    def constant(self, bits: int) -> Any:
        """Return a register with these bits."""
        ...

    def shift_right(self, x: Any, distance: int) -> Any:
        """Return x moved to the right, with zeros from the left."""
        ...

    def shift_left(self, x: Any, distance: int) -> Any:
        """Return x moved to the left."""
        ...

    def mask(self, x: Any, mask: int) -> Any:
        """Return x & mask."""
        ...

    def and_or(self, x: Any, mask: int, bits: Any) -> Any:
        """Return x & mask | bits."""
        ...

    def permute(self, low: Any, high: Any, selector: int, step: int = 0, index: Any = None) -> Any:
        """Return four bytes; the selector's four half-bytes are their numbers: 0 to 3 in `low`, 4 to 7 in `high`.

        The selector is larger by `step` times the register `index`, if there is one.
        """
        ...

    def subtract(self, x: Any, y: Any) -> Any:
        """Return the differences of two bfloat16 numbers each."""
        ...

    def multiply(self, x: Any, y: Any) -> Any:
        """Return the products of two bfloat16 numbers each."""
        ...

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """Return the products of two bfloat16 numbers each plus two others, rounded once."""
        ...

    def enlarge(self, x: Any, y: Any) -> Any:
        """Return the products of two bfloat16 numbers each: x may be subnormal, y is a large power of two."""
        ...

    def from_float16(self, x: Any) -> Any:
        """Return the lower float16 number as a float32 number."""
        ...

    def twice(self, x: Any) -> Any:
        """Return a float32 number, rounded, as two bfloat16 numbers."""
        ...

    def rest(self, x: Any, rounded: Any) -> Any:
        """Return a float32 number less the bfloat16 number that it was rounded to by `twice`."""
        ...


class EmulatedRegisters:
    """The instructions on int32 arrays."""

    def constant(self, bits: int) -> Array:
        return jnp.full((1, 1), bits - (bits >> 31 << 32), jnp.int32)

    def shift_right(self, x: Array, distance: int) -> Array:
        return lax.shift_right_logical(x, jnp.full_like(x, distance))

    def shift_left(self, x: Array, distance: int) -> Array:
        return lax.shift_left(x, jnp.full_like(x, distance))

    def mask(self, x: Array, mask: int) -> Array:
        return x & self.constant(mask)

    def and_or(self, x: Array, mask: int, bits: Array) -> Array:
        return x & self.constant(mask) | bits

    def permute(self, low: Array, high: Array, selector: int, step: int = 0, index: Array | None = None) -> Array:
        result = self.constant(0)
        numbers = self.constant(selector) + (0 if index is None else step * index)
        for byte in range(4):
            number = numbers >> 4 * byte & 7
            source = jnp.where(number < 4, low, high)
            result = result | (source >> 8 * (number & 3) & 255) << 8 * byte
        return result

    def subtract(self, x: Array, y: Array) -> Array:
        return self._in_halves(lambda x, y: x - y, x, y)

    def multiply(self, x: Array, y: Array) -> Array:
        return self._in_halves(lambda x, y: x * y, x, y)

    def multiply_add(self, x: Array, y: Array, z: Array) -> Array:
        return self._in_halves(lambda x, y, z: x * y + z, x, y, z)

    def enlarge(self, x: Array, y: Array) -> Array:
        # A CPU takes subnormal numbers for 0.
        def multiply(x_bits: Array, y_bits: Array) -> Array:
            fraction, is_normal = (x_bits & 0x7F).astype(jnp.float32), x_bits & 0x7F80
            unit = jnp.float32(2.0**_TINY_UNIT)
            subnormal = fraction * jnp.float32(2.0 ** (_TINY_UNIT - 133))
            magnitude = jnp.where(is_normal > 0, _as_float(x_bits & 0x7FFF) * unit, subnormal)
            sign = jnp.where(x_bits & 0x8000, -1.0, 1.0)
            return sign * magnitude * (_as_float(y_bits) / unit)

        halves = [multiply(*(a >> shift & _HALF for a in (x, y))) for shift in (0, 16)]
        return _join(*halves)

    def from_float16(self, x: Array) -> Array:
        number = lax.bitcast_convert_type((x & _HALF).astype(jnp.uint16), jnp.float16)
        return lax.bitcast_convert_type(number.astype(jnp.float32), jnp.int32)

    def twice(self, x: Array) -> Array:
        number = lax.bitcast_convert_type(x, jnp.float32)
        return _join(number, number)

    def rest(self, x: Array, rounded: Array) -> Array:
        rest = lax.bitcast_convert_type(x, jnp.float32) - _as_float(rounded & _HALF)
        return lax.bitcast_convert_type(rest, jnp.int32)

    def _in_halves(self, function: Any, *registers: Array) -> Array:
        halves = [function(*(_as_float(x >> shift & _HALF) for x in registers)) for shift in (0, 16)]
        return _join(*halves)


def _as_float(bits: Array) -> Array:
    """Return the float32 numbers of bfloat16 numbers' bits."""
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def _join(low: Array, high: Array) -> Array:
    """Return float32 numbers, rounded, as pairs of bfloat16 numbers."""

    def bits(x: Array) -> Array:
        # XLA would remove a conversion back and forth.
        rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return lax.shift_right_logical(lax.bitcast_convert_type(rounded, jnp.int32), jnp.full(x.shape, 16, jnp.int32))

    return bits(low) | bits(high) << 16


class EmittedRegisters:
    """The instructions as PTX, in the program under construction."""

    def __init__(self, zero: Any) -> None:
        """Take an int32 0 that ptxas does not know to be 0: it would load constants anew for each use."""
        self._zero = zero
        self._constants: dict[int, Any] = {}

    def thread_of_row(self) -> Any:
        """Return the number of the thread among the four that share a row."""
        return self._emit("{ .reg .b32 lane; mov.u32 lane, %laneid; and.b32 $0, lane, 3; }")

    def constant(self, bits: int) -> Any:
        if bits not in self._constants:
            self._constants[bits] = self._emit(f"or.b32 $0, $1, {bits:#x};", self._zero)
        return self._constants[bits]

    def shift_right(self, x: Any, distance: int) -> Any:
        return self._emit(f"shr.u32 $0, $1, {distance};", x) if distance else x

    def shift_left(self, x: Any, distance: int) -> Any:
        return self._emit(f"shl.b32 $0, $1, {distance};", x) if distance else x

    def mask(self, x: Any, mask: int) -> Any:
        return self._emit(f"and.b32 $0, $1, {mask:#x};", x)

    def and_or(self, x: Any, mask: int, bits: Any) -> Any:
        return self._emit(f"lop3.b32 $0, $1, {mask:#x}, $2, 0xEA;", x, bits)

    def permute(self, low: Any, high: Any, selector: int, step: int = 0, index: Any = None) -> Any:
        if index is None:
            return self._emit(f"prmt.b32 $0, $1, $2, {selector:#x};", low, high)
        numbers = self._emit(f"mad.lo.s32 $0, $1, {step:#x}, {selector:#x};", index)
        return self._emit("prmt.b32 $0, $1, $2, $3;", low, high, numbers)

    def subtract(self, x: Any, y: Any) -> Any:
        return self._emit("sub.bf16x2 $0, $1, $2;", x, y)

    def multiply(self, x: Any, y: Any) -> Any:
        return self._emit("mul.bf16x2 $0, $1, $2;", x, y)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        return self._emit("fma.rn.bf16x2 $0, $1, $2, $3;", x, y, z)

    def enlarge(self, x: Any, y: Any) -> Any:
        return self.multiply(x, y)

    def from_float16(self, x: Any) -> Any:
        return self._emit("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }", x)

    def twice(self, x: Any) -> Any:
        return self._emit("cvt.rn.bf16x2.f32 $0, $1, $1;", x)

    def rest(self, x: Any, rounded: Any) -> Any:
        return self._emit("{ .reg .b32 high; and.b32 high, $2, 0xffff0000; sub.f32 $0, $1, high; }", x, rounded)

    @staticmethod
    def _emit(text: str, *operands: Any) -> Any:
        return llvm.inline_asm(
            ir.IntegerType.get_signless(32), list(operands), text, ",".join(["=r", *("r" for _ in operands)])
        )


class EmittedAmpereRegisters(EmittedRegisters):
    """The instructions as PTX for GPUs from Ampere on, which have no other arithmetic on two bfloat16 numbers."""

    def subtract(self, x: Any, y: Any) -> Any:
        return self.multiply_add(y, self.constant(0xBF80BF80), x)  # -1

    def multiply(self, x: Any, y: Any) -> Any:
        return self.multiply_add(x, y, self.constant(0x80008000))  # -0, so that a product of 0 keeps its sign

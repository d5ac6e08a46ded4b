"""A quantized matrix as JAX arrays: its parts are leaves of a pytree, and its format is static."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .format import CHUNK, CODEBOOKS, PLANES, WeightFormat


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A matrix [*lead, out, in], or several, held as parts [*lead, out, width]. Parts may also be specs of arrays."""

    parts: Mapping[str, Any]
    """The parts that the format has, by name."""
    format: WeightFormat = field(metadata={"static": True})
    is_packed: bool = field(default=False, metadata={"static": True})
    """True if codes of fewer than 8 bits share bytes, as `pack` packs them."""

    @property
    def codes(self) -> Any:
        """Return the codes."""
        return self.parts["codes"]

    @property
    def scales(self) -> Any:
        """Return the scales."""
        return self.parts["scales"]

    @property
    def num_inputs(self) -> int:
        """Return the number of inputs of a row."""
        width = self.codes.shape[-1]
        return width * 8 // self.format.bits if self.is_packed and self.format.is_packed else width

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the numbers, [*lead, out, in]."""
        return (*self.codes.shape[:-1], self.num_inputs)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.codes.shape)

    def unordered(self) -> tuple[Quantized, Any]:
        """Return the matrix without the order of its inputs, and that order, or None if the inputs are in order."""
        if not self.format.is_ordered:
            return self, None
        parts = {name: part for name, part in self.parts.items() if name != "order"}
        return Quantized(parts, replace(self.format, is_ordered=False), self.is_packed), self.parts["order"]

    def map(self, function: Callable[[Any], Any]) -> Quantized:
        """Return the matrix with a function applied to each part."""
        return Quantized({name: function(part) for name, part in self.parts.items()}, self.format, self.is_packed)

    def values(self) -> Array:
        """Return the float32 numbers of the codes, before scales and mins."""
        form, codes = self.format, self.codes
        if not form.is_packed:
            return codes.astype(jnp.float32)
        if self.is_packed:
            codes = _unpack(codes, form.bits)
        if form.values in CODEBOOKS:
            return jnp.asarray(form.table()).at[codes.astype(jnp.uint32)].get(mode="promise_in_bounds")
        return codes.astype(jnp.float32) - jnp.float32(form.offset)

    def numbers(self) -> Array:
        """Return the float32 numbers [*lead, out, in]. With a format of one scale for each row they are not scaled."""
        values = self.values()
        if self.format.group is None:
            return values
        scales, mins = self.scales_and_mins()
        numbers = values.reshape(*scales.shape, -1) * scales[..., None]
        return (numbers if mins is None else numbers - mins[..., None]).reshape(values.shape)

    def scales_and_mins(self) -> tuple[Array, Array | None]:
        """Return the float32 scale and min of each group, [*lead, out, groups]."""
        parts = {name: part.astype(jnp.float32) for name, part in self.parts.items() if name != "codes"}
        scales, mins = parts["scales"], parts.get("mins")
        for name, factors in ((n, parts[n]) for n in ("scale_factors", "min_factors") if n in parts):
            repeats = scales.shape[-1] // factors.shape[-1]
            spread = jnp.repeat(factors, repeats, axis=-1)
            if name == "scale_factors":
                scales = scales * spread
            elif mins is not None:
                mins = mins * spread
        if "zeros" in parts:
            mins = parts["zeros"] * scales
        return scales, mins


def pack_nibbles(codes: Array) -> Array:
    """Pack codes of 4 bits as `parts.pack` does."""
    chunks = codes.reshape(*codes.shape[:-1], -1, 2, CHUNK // 2)
    return (chunks[..., 0, :] | chunks[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def _unpack(packed: Array, bits: int) -> Array:
    """Return packed codes as one array entry each; see `parts.unpack`."""
    chunks = packed.reshape(*packed.shape[:-1], -1, CHUNK * bits // 8)
    codes, start, low = None, 0, 0
    for width in PLANES[bits]:
        stop = start + CHUNK * width // 8
        plane = chunks[..., start:stop]
        shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)
        if width == 1:  # all bits of a byte, then those of the next
            bits_of_plane = (plane[..., :, None] >> shifts) & 1
        else:
            bits_of_plane = (plane[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)
        bits_of_plane = bits_of_plane.reshape(*plane.shape[:-1], CHUNK) << low
        codes = bits_of_plane if codes is None else codes | bits_of_plane
        start, low = stop, low + width
    assert codes is not None
    return codes.reshape(*packed.shape[:-1], -1)

"""The arguments and results of a call of the CPU's attention kernel, and how its numbers lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, LiteralString

from pallas_kernels.native.emitter import F32, I64, LANES, POINTER, Emitter
from pallas_kernels.native.number_formats import FORMATS, Format

from ..layout import AttentionShape, has_pairs

BUFFERS = [
    "pool_k",
    "pool_v",
    "q",
    "k",
    "v",
    "slots",
    "tables",
    "lens",
    "ends",
    "num_decodes",
    "tile_seqs",
    "tile_rows",
    "num_tiles",
    "row_ends",
    "first_block",
    "window",
    "scale",
    "soft_cap",
    "sinks",
    "cos",
    "sin",
    "pool_k_after",
    "pool_v_after",
    "out",
]
"""The call's arguments and results, in order. Without a soft cap `soft_cap` is 0; without them, `row_ends`, `sinks` and
the rotation's `cos` and `sin` are empty."""


class Call:
    """The base of the kernel's functions: the shape they are compiled for, and access to a call's arrays."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.format, self.kv_format = FORMATS[shape.dtype], FORMATS[shape.kv_dtype]
        self.width = 2 if has_pairs(shape) else 1
        """The number of numbers that one step of a sum takes."""
        self.has_words = self.kv_format.num_bytes * self.width == 4
        """True if a step takes 32 bits."""

    def buffers(self, e: Emitter, buffers: Any) -> dict[str, Any]:
        """Return the addresses of the call's arrays, by name."""
        return {name: e.load(buffers, POINTER, index) for index, name in enumerate(BUFFERS)}

    def size(self, e: Emitter, dims: Any, name: LiteralString, axis: int) -> Any:
        """Return the size of an array's axis."""
        return e.load(e.load(dims, POINTER, BUFFERS.index(name)), I64, axis)

    def has_rope(self, e: Emitter, dims: Any) -> Any:
        """Return whether the kernel rotates queries and keys."""
        return e.ir.icmp_signed(">", self.size(e, dims, "cos", 0), I64(0))

    def rotate(self, e: Emitter, of: dict[str, Any], stored: Format, x: Any, angles: Any) -> Iterator[tuple[Any, Any]]:
        """Yield vectors of a head's numbers, rotated, with their positions in the head."""
        half = self.shape.head_dim // 2
        lanes = LANES if half % LANES == 0 else LANES // 2
        for i in range(0, half, lanes):
            first, second = (
                stored.widen(e, e.load_vector(x, stored.storage, place, lanes=lanes)) for place in (i, half + i)
            )
            cos, sin = (e.load_vector(of[name], F32, angles, i, lanes=lanes) for name in ("cos", "sin"))
            yield e.ir.fsub(e.ir.fmul(first, cos), e.ir.fmul(second, sin)), i
            yield e.ir.fadd(e.ir.fmul(second, cos), e.ir.fmul(first, sin)), half + i

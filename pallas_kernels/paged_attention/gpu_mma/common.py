"""The common part of the kernels for NVIDIA's GPUs from Ampere on: layouts, warp-level matmuls, and KV tiles.

They use what all these GPUs have: plain loads, shared memory of one warpgroup, and `mma.sync`. Without TMA, wgmma and
asynchronous barriers, one source runs on compute capabilities 8.0 to 12.1. It is written in Mosaic GPU (`plgpu`), for
jax 0.11.2 to 0.12.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from ..layout import FLOAT8

# The rows of an mma, and the number of tokens that a tile's loads are a multiple of.
MMA_ROWS = 16
COPY_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""The layout in which tiles pass from memory to shared memory: each thread has 8 numbers of a row side by side."""


def compiler_params() -> plgpu.CompilerParams:
    """Return the compiler parameters of all kernels. They synchronize threads themselves."""
    return plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
    )


def synchronize(interpret: bool) -> None:
    """Wait until all threads have come here; then each sees what the others have written to shared memory.

    The interpreter runs a thread block as one thread.
    """
    if interpret:
        return

    inline: Any = plgpu.inline_mgpu()

    @inline
    def barrier(_: Any) -> None:
        mgpu.warpgroup_barrier()

    barrier()


class Operands(NamedTuple):
    """The layouts of the operands of an `mma`, whose four warps divide its rows or its columns."""

    lhs: Any
    rhs: Any
    sum: Any

    @staticmethod
    def of(dtype: DTypeLike, *, row_warps: int) -> Operands:
        """Return the layouts with `row_warps` warps side by side in the rows, and the others in the columns."""
        kinds = (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
        return Operands(*(kind(dtype, m_warps=row_warps) for kind in kinds))


def add_product(total: Array, a: Array, b: Array, interpret: bool) -> Array:
    """Return `total + a @ b` in float32. The interpreter knows no `mma`."""
    if interpret:
        return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(total, a, b)


def as_operand(weights: Array, dtype: DTypeLike, mma: Operands, interpret: bool) -> Array:
    """Cast a result of an `mma`, 16 rows a warp, and return it as the left operand of the next.

    Each thread has the same numbers in both, in the same order, which jax does not know.
    """
    if interpret:
        return weights.astype(dtype)
    layout = mma.lhs.to_mgpu()

    result = plgpu.ShapeDtypeStruct(weights.shape, jnp.dtype(dtype), layout=mma.lhs)
    inline: Any = plgpu.inline_mgpu(arg_types=(mma.sum,), return_type=result)

    @inline
    def cast(_: Any, x: Any) -> Any:
        registers = x.astype(mgpu.utils.dtype_to_ir_type(dtype)).registers
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(x.shape)), _layout=layout, _is_signed=None
        )

    return cast(weights)


def zeros(shape: tuple[int, ...], layout: Any) -> Array:
    """Return float32 zeros in a layout."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def along_rows(vector: Array, matrix: Array, layout: Any) -> Array:
    """Return `vector`, one entry per row, in the shape of `matrix` and in its layout."""
    return lax.broadcast_in_dim(plgpu.layout_cast(vector, layout.reduce(1)), matrix.shape, (0,))


def store_vector(ref: Any, vector: Array) -> None:
    """Store a vector that fills no whole cache lines in global memory, which newer versions of jax warn of."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, vector, optimized=False)
    else:
        ref[...] = vector


class KVTiles(NamedTuple):
    """How tiles of K and V pass from the blocks through registers into shared memory, in columns from `first` on."""

    kv: Any
    """The pool [l * b, k, o, 2 h]."""
    tables_sm: Any
    first_row: Array
    """The pool's row of the layer's null block."""
    dtype: Any
    """The dtype of the matmuls."""
    tile: int
    """The number of tokens of a tile."""

    @property
    def piece(self) -> int:
        """Return the number of tokens that lie side by side."""
        return min(self.kv.shape[2], self.tile)

    def load(self, seq: Array, head: Array, position: Array, columns: Any) -> tuple[Array, ...]:
        """Return the pieces of the tile that starts at a position, a multiple of the tile."""
        o, pieces = self.kv.shape[2], []
        for start in range(0, self.tile, self.piece):
            at = position + start
            # The last tile may reach beyond the table.
            block = self.tables_sm[seq, lax.min(lax.div(at, o), self.tables_sm.shape[1] - 1)]
            rows = pl.ds(pl.multiple_of(lax.rem(at, o), self.piece), self.piece)
            source = self.kv.at[self.first_row + block, head, rows, columns]
            pieces.append(plgpu.load(source, layout=COPY_LAYOUT, optimized=False))
        return tuple(pieces)

    def nothing(self, pieces: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return zeros of the shape of pieces."""
        return tuple(plgpu.layout_cast(jnp.zeros(x.shape, x.dtype), COPY_LAYOUT) for x in pieces)

    def store(self, pieces: tuple[Array, ...], target: Any, position: Array, low: Array, end: Array) -> None:
        """Store a tile, with 0 in place of tokens outside of low .. end, which may be anything: 0 x NaN is NaN."""
        wide = tuple(widened(piece, self.dtype) for piece in pieces)

        def cleared(pieces: tuple[Array, ...]) -> tuple[Array, ...]:
            rows = plgpu.broadcasted_iota(jnp.int32, wide[0].shape, 0, layout=COPY_LAYOUT)
            starts = [position + index * self.piece for index in range(len(pieces))]
            return tuple(
                jnp.where((rows + start >= low) & (rows + start < end), piece, jnp.zeros_like(piece))
                for start, piece in zip(starts, pieces, strict=True)
            )

        is_partial = (position < low) | (position + self.tile > end)
        for index, piece in enumerate(lax.cond(is_partial, cleared, lambda pieces: pieces, wide)):
            target[pl.ds(index * self.piece, self.piece)] = piece


def widened(x: Array, dtype: DTypeLike) -> Array:
    """Return a pool's numbers in the matmuls' dtype, exactly. NaN becomes finite, and so do infinities in bfloat16.

    A pool holds neither. GPUs before Ada do not convert 8-bit floats, so their bits are put in place in a float32, and
    multiplied by a constant power of two.
    """
    if x.dtype not in FLOAT8:
        return x
    fraction_bits = jnp.finfo(x.dtype).nmant
    exponent_bits = 7 - fraction_bits
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32) << (23 - fraction_bits)
    mask = -(2**31) | (127 << (23 - fraction_bits))
    numbers = lax.bitcast_convert_type(bits & mask, jnp.float32)
    return (numbers * 2.0 ** (128 - 2 ** (exponent_bits - 1))).astype(dtype)

"""The options and tile sizes that the TPU kernels are compiled for."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..layout import FLOAT8, AttentionShape, refuse_sizes
from ..tiles import Tiles

LANES = 128
SUBLANES = 8
ROW_ALIGNMENT = 16
"""Longer chunks start at a multiple of this row of the step."""
_VMEM_LIMIT = 56 * 2**20
_RING_BYTES: dict[str | None, int] = {"TPU7x": 16 * 2**20}
"""The bytes of KV tiles in VMEM, by the kind of device. In 2 us 3.7 TB/s bring 7.4 MB, and 1.6 TB/s 3.3 MB."""
_MOST_BUFFERS = 16
SHORT = (128, 256)
"""Contexts up to these lengths share a KV tile with others."""


class Options(NamedTuple):
    """The static options of a call."""

    name: str
    """The name of the kernels' programs."""
    group: int
    keys: slice
    """The columns of a token's row in the pool that queries, which are as wide, are multiplied by."""
    values: slice
    """The columns that are summed up, which may be among the columns of keys."""
    block_size: int
    scale: float
    soft_cap: float | None
    has_sinks: bool
    has_row_ends: bool
    has_chosen: bool
    """True if each row attends to positions that are chosen for it, and to no others."""
    has_pairs: bool
    """True if decode multiplies two kv heads at a time; see `softmax.Operands`."""
    unpacks_float8: bool
    """True if the pool is read by `float8.unpack`."""
    tiles: Tiles
    interpret: bool

    @property
    def num_values(self) -> int:
        """Return the columns of the output."""
        return self.values.stop - self.values.start

    @property
    def kv_tile(self) -> int:
        """Return the number of tokens of a KV tile."""
        return max(self.tiles.kv, self.block_size)

    @property
    def short(self) -> tuple[int, ...]:
        """Return the lengths up to which contexts share a KV tile: those that fit several times."""
        return () if self.has_chosen else tuple(size for size in SHORT if 2 * size <= self.kv_tile)

    @property
    def absent(self) -> set[str]:
        """Return the names of the refs that the kernels do not have."""
        absent: set[str] = set() if self.has_sinks else {"sinks_krx"}
        if not self.has_row_ends:
            absent |= {"tile_ends_i", "least_ends_p", "most_ends_p", "ahead"}
        return absent if self.has_chosen else absent | {"chosen"}

    def slab(self, dtype: Any) -> int:
        """Return the rows of the pool that are read and written together: a tile of XLA's layout of the dtype.

        In VMEM the compiler would give 16 rows of bfloat16 a layout of their own, and a copy of them nine words of
        strides.
        """
        return min(self.block_size, 32 if jnp.dtype(dtype).itemsize == 1 else SUBLANES)

    def pallas_options(self) -> dict[str, Any]:
        """Return the options of every `pallas_call`."""
        if self.interpret:
            return {"interpret": pltpu.InterpretParams()}
        # Tests in the interpreter find reads and writes out of bounds; the checks cost as much as a copy's start.
        return {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT, disable_bounds_checks=True)}


def matmul_dtype(q: Any, pool: Any) -> Any:
    """Return the dtype in which K and V enter the matmuls."""
    return jnp.float32 if jnp.float32 in (q, pool) else jnp.bfloat16


def div(a: Any, b: int) -> Any:
    """Divide a non-negative scalar; a shift, where it can be one, needs no code for the sign."""
    return lax.div(a, jnp.int32(b)) if b & (b - 1) else lax.shift_right_logical(a, jnp.int32(b.bit_length() - 1))


def rem(a: Any, b: int) -> Any:
    """Return the remainder of a non-negative scalar."""
    return lax.rem(a, jnp.int32(b)) if b & (b - 1) else a & jnp.int32(b - 1)


def ceil_div(a: Any, b: int) -> Any:
    """Divide a non-negative scalar, rounding up."""
    return div(a + (b - 1), b)


def hbm() -> pl.BlockSpec:
    """Return the spec of an operand that a kernel fetches itself."""
    return pl.BlockSpec(memory_space=pl.ANY)


def tpu_refusal(shape: AttentionShape) -> str | None:
    """Return why the kernels cannot run a shape, or None if they can."""
    # A float8 tile has 32 rows.
    block_sizes = (32, 64, 128) if shape.kv_dtype in FLOAT8 else (16, 32, 64, 128)
    return refuse_sizes(shape, (64, 128, 256, 512), (jnp.bfloat16, jnp.float32), block_sizes)


def tpu_tiles(shape: AttentionShape, architecture: str | None) -> Tiles:
    """Return tile sizes that fit the fast memory of every generation.

    `decode` is the number of KV tiles in the ring, possibly each of another sequence. All but one are in flight, to
    hide the latency of HBM. `query` is a number of tokens; their rows of all heads fit.
    """
    token_bytes = shape.num_kv_heads * 2 * shape.head_dim * jnp.dtype(shape.kv_dtype).itemsize
    kv = 512 if 512 * token_bytes <= 4 * 2**20 else 256
    decode = ring_length(kv * token_bytes, architecture)
    row_bytes = shape.num_heads * max(shape.head_dim, LANES) * 4
    query = max(tokens for tokens in (64, 128, 256) if tokens == 64 or tokens * row_bytes <= 4 * 2**20)
    return Tiles(decode=decode, query=query, kv=kv)


def ring_length(tile_bytes: int, architecture: str | None) -> int:
    """Return the number of KV tiles of the ring of decodes."""
    return max(3, min(_MOST_BUFFERS, _RING_BYTES.get(architecture, 8 * 2**20) // tile_bytes))


def take(kind: Any, refs: tuple[Any, ...], absent: Container[str] = ()) -> tuple[Any, tuple[Any, ...]]:
    """Return the first of a kernel's refs as the NamedTuple `kind`, with None for absent fields, and the other refs."""
    remaining = iter(refs)
    taken = kind(*(None if name in absent else next(remaining) for name in kind._fields))
    return taken, tuple(remaining)


def present(record: tuple[Any, ...]) -> list[Any]:
    """Return the fields of a NamedTuple that are not None."""
    return [x for x in record if x is not None]

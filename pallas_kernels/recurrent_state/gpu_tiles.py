"""Pass states from tile to tile of longer chunks on Hopper: a thread block carries its part of a head's state along.

What a tile's tokens come to without a state is given, see `chunks.py`; it comes by TMA while the tile before is
computed. The state stays in registers in float32. Products are of the tensor cores, whose operands are bfloat16: a
float32 number goes as two halves, and the product of two lesser halves is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import (
    SMEM_BYTES,
    SMEM_RESERVED,
    compiler_params,
    interpret_params,
    smem_bytes,
    tiled_smem,
)

from .chunks import TILE_ROWS, Tiles, rounded_halves
from .gpu import MATRIX, OF_ROWS, PART, load_vector, spread

TILES_BYTES = 96 << 20
"""The most bytes of the inputs in float32 of tiles that are prepared at once: few launches, and much to do in each."""
NUM_SMS, MOST_RUNS = 132, 4
"""Chunks of several sequences go side by side, as far as multiprocessors would be idle else."""
STATE_COLUMNS = 128
"""How many columns of a state are one array in registers."""


class Products(NamedTuple):
    """What tokens of n tiles come to before states are known, for h heads of k numbers of a key and d of a value.

    The rows of what is float32 are there twice where bfloat16 is named: the halves of tile after half of tile.
    """

    q: Array
    """Queries of the state before the tile [n, key heads, c or 2 c, k] in bfloat16."""
    w: Array | None
    """What the state is multiplied by, to be subtracted from `u` [n, h, 2 c, k] in bfloat16; None for nothing."""
    u: Array
    """What tokens add, had the state been zeros [n, h, c, d]; bfloat16 or float32."""
    scores: Array
    """How much of what each token adds a token reads [n, h, 2 c, c] in bfloat16."""
    k: Array
    """The keys that it is added at in the state after the tile [n, key heads, c or 2 c, k] in bfloat16."""
    q_factor: Array
    """What queries are to be multiplied by [n, h, c]."""
    k_factor: Array
    """What keys are to be multiplied by [n, h, c]."""
    decay: Array
    """By what the state shrinks [n, h, 1 or k]."""


def stacked_halves(x: Array) -> Array:
    """Return a float32 array [..., c, k] as two of bfloat16, one below the other; and one of those as it is."""
    return jnp.concatenate(rounded_halves(x), axis=-2)


class _Config(NamedTuple):
    """What the kernel is compiled for, besides shapes."""

    axis: int
    """The axis of a head's matrix that is one of values: 1, or 0 where keys are its columns."""
    group: int
    """Heads of a key head."""
    interpret: bool


class _Smem(NamedTuple):
    """Shared memory: rings [stage, ...] of what a tile brings, and what is computed."""

    q: Any
    w: Any
    u: Any
    scores: Any
    k: Any
    deltas: Any
    """Halves of what tokens add [2 c, part]."""
    read: Any
    """What is read [c, part], on its way to memory."""
    state: Any
    """A state on its way from or to the pool; or its halves, one below the other."""

    @property
    def rings(self) -> list[list[Any]]:
        """Return the rings of what is brought together, in the order in which it is needed."""
        return [[self.q] if self.w is None else [self.q, self.w], [self.u, self.scores], [self.k]]


def _smem_types(products: Products, matrix: Sequence[int], out_dtype: Any, stages: tuple[int, int]) -> _Smem:
    def ring(x: Array, count: int, columns: int = 0) -> Any:
        return tiled_smem((count, x.shape[2], columns or x.shape[3]), x.dtype)

    first, second = stages
    rows, columns = matrix
    return _Smem(
        q=ring(products.q, first),
        w=None if products.w is None else ring(products.w, first),
        u=ring(products.u, second, PART),
        scores=ring(products.scores, second),
        k=ring(products.k, second),
        deltas=tiled_smem((1, 2 * TILE_ROWS, PART), jnp.bfloat16),
        read=tiled_smem((TILE_ROWS, PART), out_dtype),
        state=plgpu.RefUnion(
            tiled_smem((rows, columns), jnp.float32, columns=32), tiled_smem((1, 2 * rows, columns), jnp.bfloat16)
        ),
    )


def _total_bytes(smem: _Smem) -> int:
    return sum(smem_bytes(x.refs[0] if isinstance(x, plgpu.RefUnion) else x) for x in smem if x is not None)


def pass_states(
    pool: Array, tiles: Tiles, products: Products, name: str, out_dtype: Any, *, axis: int, interpret: bool
) -> tuple[Array, Array]:
    """Return the pool after n tiles, and what they read [n, c, h, d]. Those of a chunk go one after the other.

    Matrices of heads in the pool are [k, d], or [d, k] for an `axis` of 0. What empty tiles read is undefined.
    """
    num_tiles, num_heads, _, value_dim = products.u.shape
    matrix = list(pool.shape[2:])
    matrix[axis] = PART
    most = SMEM_BYTES - SMEM_RESERVED
    num_runs = min(MOST_RUNS, num_tiles, -(-NUM_SMS // (num_heads * value_dim // PART)))
    # What is first needed of a tile had better be there before the tile before is done.
    candidates = [_smem_types(products, matrix, out_dtype, stages) for stages in ((2, 2), (2, 1), (1, 1))]
    smem = next((x for x in candidates if _total_bytes(x) <= most), candidates[-1])
    kernel = plgpu.kernel(
        partial(_kernel, _Config(axis, num_heads // products.q.shape[1], interpret), products.w is not None),
        out_type=jax.ShapeDtypeStruct((num_tiles * TILE_ROWS, num_heads * value_dim), out_dtype),
        grid=(value_dim // PART, num_heads, num_runs),
        grid_names=("part", "head", "run"),
        kernel_name=name,
        scratch_types={
            "smem": smem,
            "full": [plgpu.Barrier(num_arrivals=len(x), num_barriers=x[0].shape[0]) for x in smem.rings],
            "state_full": plgpu.Barrier(),
        },
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    count = jnp.sum(tiles.starts_n < tiles.ends_n, dtype=jnp.int32)
    numbers_n = lax.iota(jnp.int32, num_tiles)
    # Between groups of tiles that are taken at once states are in the pool.
    is_loaded_n = (tiles.is_first_n > 0) | (numbers_n == 0)
    is_kept_n = (tiles.is_kept_n > 0) | (numbers_n == count - 1)
    flags = tiles.begins_n, is_loaded_n.astype(jnp.int32), is_kept_n.astype(jnp.int32)
    # Each run of tiles begins with a chunk: the first one from its share of all tiles on.
    shares_r = lax.iota(jnp.int32, num_runs + 1) * count // num_runs
    begins_rn = is_loaded_n & (numbers_n >= shares_r[:, None]) & (numbers_n < count)
    starts_r = jnp.min(jnp.where(begins_rn, numbers_n, count), axis=1)
    pool_ref = jax.new_ref(pool)
    operands = [x for x in products if x is not None]
    read = kernel(starts_r, *flags, tiles.reads_n, tiles.writes_n, tiles.copies_n, pool_ref, *operands)
    return jax.freeze(pool_ref), read.reshape(num_tiles, TILE_ROWS, num_heads, value_dim)


def _kernel(config, has_w, starts_r, *refs, smem, full, state_full):
    begins_n, loaded_n, kept_n, reads_n, writes_n, copies_n, pool, *operands, out = refs
    part, head, run = (lax.axis_index(name) for name in ("part", "head", "run"))
    start, end = starts_r[run], starts_r[run + 1]
    given: Any = Products(*(operands if has_w else [operands[0], None, *operands[1:]]))
    own = pl.ds(pl.multiple_of(part * PART, PART), PART)
    matrix, _ = smem.state
    key_head = lax.div(head, config.group)
    # Few registers at a time, besides a state's own.
    width = min(matrix.shape[1], STATE_COLUMNS)
    parts = [pl.ds(first, width) for first in range(0, matrix.shape[1], width)]
    zeros = plgpu.layout_cast(jnp.zeros((matrix.shape[0], width), jnp.float32), MATRIX)

    def in_pool(slot):
        of_head = pool.at[slot, head]
        return of_head.at[:, own] if config.axis else of_head.at[own]

    sources = [
        [(given.q, key_head, ()), *[(given.w, head, ())] * has_w],
        [(given.u, head, (slice(None), own)), (given.scores, head, ())],
        [(given.k, key_head, ())],
    ]

    def bring(i, tile):
        """Start bringing the i-th part of what a tile takes, if there is such a tile."""

        @pl.when(tile < end)
        def _():
            stage = lax.rem(tile, smem.rings[i][0].shape[0])
            for (source, of_head, columns), ring in zip(sources[i], smem.rings[i], strict=True):
                plgpu.copy_gmem_to_smem(source.at[tile, of_head, *columns], ring.at[stage], full[i].at[stage])

    def load_state(tile, state):
        del state
        goes_on = begins_n[tile] == 0

        @pl.when(goes_on)
        def _():
            plgpu.copy_gmem_to_smem(in_pool(reads_n[tile]), matrix, state_full)
            plgpu.barrier_wait(state_full)

        @pl.when(jnp.logical_not(goes_on))
        def _():
            for part in parts:
                matrix[:, part] = zeros

        state = [plgpu.load(matrix.at[:, part], layout=MATRIX) for part in parts]
        plgpu.commit_smem()  # its halves take its place
        return state

    def step(tile, state):
        first, second, third = (lax.rem(tile, ring[0].shape[0]) for ring in smem.rings)
        # Unless these are opaque to LLVM, it computes all matrix descriptors first and holds them in registers.
        tile, first, second, third, only = lax.optimization_barrier((tile, first, second, third, jnp.int32(0)))
        halves, deltas = smem.state[1].at[only], smem.deltas.at[only]
        q_factor, k_factor = (load_vector(x.at[tile, head], OF_ROWS) for x in (given.q_factor, given.k_factor))
        is_vector = given.decay.shape[2] > 1
        decay = load_vector(given.decay.at[tile, head], OF_ROWS) if is_vector else given.decay[tile, head, 0]
        state = lax.cond(loaded_n[tile] > 0, partial(load_state, tile), lambda state: state, state)
        for part, own_state in zip(parts, state, strict=True):
            store_halves(halves.at[:, part], own_state)
        plgpu.commit_smem()
        states = [x if config.axis else x.T for x in halves_of(halves)]

        def load_added():
            return plgpu.load(smem.u.at[second], layout=MATRIX).astype(jnp.float32)

        plgpu.barrier_wait(full[0].at[first])
        queried = product(parts_of(smem.q.at[first]), states)
        taken = None if given.w is None else product(parts_of(smem.w.at[first]), states)
        plgpu.barrier_wait(full[1].at[second])
        added, delta = [smem.u.at[second]], None
        if taken is not None:
            delta = load_added() - taken
            added = halves_of(deltas)
            store_halves(deltas, delta)
            plgpu.commit_smem()
            bring(0, tile + smem.q.shape[0])
        queried = queried * spread(q_factor, queried.shape, 0)
        read = _add_product(queried, parts_of(smem.scores.at[second]), added, config.interpret)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.read[...] = read.astype(smem.read.dtype)
        # Without corrections it is loaded only now: a wide state leaves few registers.
        delta = load_added() if delta is None else delta
        store_halves(deltas, delta * spread(k_factor, delta.shape, 0))
        plgpu.commit_smem()
        if taken is None:
            bring(0, tile + smem.q.shape[0])
        bring(1, tile + smem.u.shape[0])
        rows = pl.ds(pl.multiple_of(tile * TILE_ROWS, TILE_ROWS), TILE_ROWS)
        value_dim = out.shape[1] // pool.shape[1]
        columns = pl.ds(pl.multiple_of(head * value_dim + own.start, PART), PART)
        plgpu.copy_smem_to_gmem(smem.read, out.at[rows, columns])

        plgpu.barrier_wait(full[2].at[third])
        keys, added = parts_of(smem.k.at[third]), halves_of(deltas)
        lefts, rights = (keys, added) if config.axis else (added, keys)
        lefts, before, state = [x.T for x in lefts], state, []
        for part, own_state in zip(parts, before, strict=True):
            own_state = own_state * (spread(decay, own_state.shape, 0) if is_vector else decay)
            own_rights = [x.at[:, part] for x in rights]
            state.append(_add_product(own_state, lefts, own_rights, config.interpret))
        plgpu.commit_smem()  # all threads are done with the tile
        bring(2, tile + smem.k.shape[0])

        @pl.when(kept_n[tile] > 0)
        def _():
            for part, own_state in zip(parts, state, strict=True):
                matrix[:, part] = own_state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(matrix, in_pool(writes_n[tile]))

            @pl.when(copies_n[tile] > 0)
            def _():
                plgpu.copy_smem_to_gmem(matrix, in_pool(copies_n[tile]))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        return state

    for i, ring in enumerate(smem.rings):
        for stage in range(ring[0].shape[0]):
            bring(i, start + stage)
    lax.fori_loop(start, end, step, [zeros] * len(parts))
    plgpu.wait_smem_to_gmem(0)


def store_halves(target: Any, value: Array) -> None:
    """Store the halves of a float32 matrix one below the other, in a Ref of twice as many rows."""
    upper, lower = halves_of(target)
    rounded = value.astype(jnp.bfloat16)
    upper[...] = rounded
    lower[...] = (value - rounded.astype(jnp.float32)).astype(jnp.bfloat16)


def halves_of(ref: Any) -> list[Any]:
    """Return the halves that `store_halves` stored."""
    rows = ref.shape[0] // 2
    return [ref.at[pl.ds(0, rows)], ref.at[pl.ds(rows, rows)]]


def parts_of(ref: Any) -> list[Any]:
    """Return the one or two parts of a tile's matrix, of 64 rows each."""
    return [ref.at[pl.ds(first, TILE_ROWS)] for first in range(0, ref.shape[0], TILE_ROWS)]


def _multiply(accumulator: Any, lefts: Sequence[Any], rights: Sequence[Any]) -> None:
    for i, left in enumerate(lefts):
        for right in rights[: max(len(lefts), len(rights)) - i]:
            plgpu.wgmma(accumulator, left, right)


def product(lefts: Sequence[Any], rights: Sequence[Any]) -> Array:
    """Return the product of two matrices in parts, without that of lesser parts."""

    def multiply(accumulator: Any) -> Array:
        _multiply(accumulator, lefts, rights)
        return accumulator[...]

    shape = lefts[0].shape[0], rights[0].shape[1]
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _add_product(value: Array, lefts: Sequence[Any], rights: Sequence[Any], interpret: bool) -> Array:
    """Return the sum of a matrix and a product. The interpreter's accumulators cannot start from a value."""
    if interpret:
        return value + product(lefts, rights)
    start: Any = plgpu.WGMMAAccumulatorRef.init(value)
    return pl.run_state(partial(_multiply, lefts=lefts, rights=rights))(start)

"""Pass states from tile to tile of longer chunks on Hopper: a thread block carries its part of a head's state along.

The parts of a tile that do not depend on a state are computed before, see `Products`; TMA loads them while the last
tile is computed. The state stays in registers in float32. Products run on the tensor cores, whose operands are
bfloat16: a float32 number becomes an upper and a lower half that sum up to it, and the product of two lower halves is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
"""The most bytes of the inputs, in float32, of tiles that are prepared at once: few launches, with much to do."""
_NUM_SMS, _MOST_RUNS = 132, 4
"""The multiprocessors of an H100, and the most runs of tiles side by side, where some of these would be idle."""
_STATE_COLUMNS = 128
"""The most columns of a state that are one array in registers."""


class Products(NamedTuple):
    """The inputs of the pass of states from n tiles of c tokens, for h heads with keys of length k and values of length
    d.

    With the state S before a tile its tokens add delta = u - w S. They read q_factor * (q S) + scores delta, and the
    state after the tile is decay * S + k^T (k_factor * delta). bfloat16 matrices of 2 c rows are float32 ones in
    halves: all rows of the upper half, then those of the lower. Factors and decays are float32.
    """

    q: Array
    """Queries of the state before the tile [n, key heads, c or 2 c, k] in bfloat16."""
    w: Array | None
    """Keys of what the state subtracts from `u` [n, h, 2 c, k] in bfloat16; None if it subtracts nothing."""
    u: Array
    """What tokens add where the state before is zeros [n, h, c, d]; float32, but bfloat16 without `w`."""
    scores: Array
    """How much a token reads of what each token adds [n, h, 2 c, c] in bfloat16."""
    k: Array
    """The keys under which it is added to the state [n, key heads, c or 2 c, k] in bfloat16."""
    q_factor: Array
    """The factors of queries [n, h, c]."""
    k_factor: Array
    """The factors of keys [n, h, c]."""
    decay: Array
    """The factor by which the state shrinks [n, h, 1], or one for each of its rows, which are then keys, [n, h, k]."""


def stacked_halves(x: Array) -> Array:
    """Return a float32 array [..., c, k] in bfloat16 halves [..., 2 c, k]; a bfloat16 array is returned unchanged."""
    return jnp.concatenate(rounded_halves(x), axis=-2)


class _Config(NamedTuple):
    """The settings that the kernel is compiled for, besides shapes."""

    axis: int
    """The axis of values in a head's matrix: 1, or 0 where keys are its columns."""
    group: int
    """The number of heads that share a key head."""
    interpret: bool


class _Smem(NamedTuple):
    """The shared memory: rings [stage, ...] of a tile's inputs, and buffers of results."""

    q: Any
    w: Any
    u: Any
    scores: Any
    k: Any
    deltas: Any
    """Halves of what tokens add [1, 2 c, PART]."""
    read: Any
    """What tokens read [c, PART], on its way to global memory."""
    state: Any
    """A float32 state [rows, columns] on its way from or to the pool, or its halves [1, 2 rows, columns]."""

    @property
    def rings(self) -> list[list[Any]]:
        """Return the rings in the order in which they are needed; rings in one list share a barrier."""
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
    """Return the pool after n tiles, and their tokens' outputs [n, c, h, d] in `out_dtype`.

    A head's matrix in the pool is [k, d], or [d, k] for an `axis` of 0. Tiles of a chunk go one after the other, chunks
    side by side in up to `_MOST_RUNS` runs. Outputs of empty tiles are undefined.
    """
    num_tiles, num_heads, _, value_dim = products.u.shape
    matrix = list(pool.shape[2:])
    matrix[axis] = PART
    most = SMEM_BYTES - SMEM_RESERVED
    num_runs = min(_MOST_RUNS, num_tiles, -(-_NUM_SMS // (num_heads * value_dim // PART)))
    # With two stages the next tile is loaded meanwhile. Where not all inputs have room for two, q and w do: they come
    # first.
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
    # A chunk may continue from the launch before, and into the next one: its state is in the pool in between.
    is_loaded_n = (tiles.is_first_n > 0) | (numbers_n == 0)
    is_kept_n = (tiles.is_kept_n > 0) | (numbers_n == count - 1)
    flags = tiles.begins_n, is_loaded_n.astype(jnp.int32), is_kept_n.astype(jnp.int32)
    # Runs have about equal shares of the tiles, but each begins with a chunk: the first from its share's start on.
    shares_r = lax.iota(jnp.int32, num_runs + 1) * count // num_runs
    begins_rn = is_loaded_n & (numbers_n >= shares_r[:, None]) & (numbers_n < count)
    starts_r = jnp.min(jnp.where(begins_rn, numbers_n, count), axis=1)
    pool_ref = jax.new_ref(pool)
    operands = [x for x in products if x is not None]
    read = kernel(starts_r, *flags, tiles.reads_n, tiles.writes_n, tiles.copies_n, pool_ref, *operands)
    return jax.freeze(pool_ref), read.reshape(num_tiles, TILE_ROWS, num_heads, value_dim)


class _Marks(NamedTuple):
    """Facts about the tiles, in global memory: flags [n] that are not 0 where true, and slots."""

    begins: Any
    """The tile begins a sequence, so that the state before it is zeros."""
    is_loaded: Any
    """The state before the tile is loaded from the pool, or is zeros. Otherwise it is in registers."""
    is_kept: Any
    """The state after the tile is stored in the pool."""
    reads: Any
    """The slot that the state is loaded from."""
    writes: Any
    """The slot that the state is stored in."""
    copies: Any
    """Another slot that the state is stored in, or 0."""


def _kernel(config, has_w, starts_r, *refs, smem, full, state_full):
    pool, *operands, out = refs[len(_Marks._fields) :]
    part, head, run = (lax.axis_index(name) for name in ("part", "head", "run"))
    start, end = starts_r[run], starts_r[run + 1]
    products = Products(*(operands if has_w else [operands[0], None, *operands[1:]]))
    values = pl.ds(pl.multiple_of(part * PART, PART), PART)
    key_head = lax.div(head, config.group)
    marks = _Marks(*refs[: len(_Marks._fields)])
    _Run(config, marks, pool, products, out, smem, full, state_full, head, key_head, values, end).pass_from(start)


@dataclass(frozen=True)
class _Run:
    """The work of a thread block: a part of a head's state is passed along a run of tiles.

    All fields except `config` are refs, or scalars of the kernel. A state is a list of slices of columns, so that an
    operation takes few registers besides the state's own.
    """

    config: _Config
    marks: _Marks
    pool: Any
    products: Products
    out: Any
    smem: _Smem
    full: Sequence[Any]
    state_full: Any
    head: Any
    key_head: Any
    values: Any
    """The slice of the head's values."""
    end: Any
    """One past the run's last tile."""

    @property
    def matrix(self) -> Any:
        """Return the state's buffer in shared memory, as float32."""
        return self.smem.state[0]

    @property
    def slices(self) -> list[Any]:
        """Return the slices of columns that a state is cut into."""
        width = min(self.matrix.shape[1], _STATE_COLUMNS)
        return [pl.ds(column, width) for column in range(0, self.matrix.shape[1], width)]

    def pass_from(self, start: Any) -> None:
        """Pass the state along the tiles from `start` to `end`."""
        zeros = plgpu.layout_cast(jnp.zeros((self.matrix.shape[0], self.slices[0].size), jnp.float32), MATRIX)
        for i, ring in enumerate(self.smem.rings):
            for stage in range(ring[0].shape[0]):
                self._prefetch(i, start + stage)
        state: Any = [zeros] * len(self.slices)
        lax.fori_loop(start, self.end, self._step, state)
        plgpu.wait_smem_to_gmem(0)

    def _prefetch(self, i: int, tile: Any) -> None:
        """Start to load a tile's inputs into the i-th of `rings`, if the run has such a tile."""
        products: Any = self.products
        sources = [
            [(products.q, self.key_head, ()), *([] if products.w is None else [(products.w, self.head, ())])],
            [(products.u, self.head, (slice(None), self.values)), (products.scores, self.head, ())],
            [(products.k, self.key_head, ())],
        ]

        @pl.when(tile < self.end)
        def _():
            stage = lax.rem(tile, self.smem.rings[i][0].shape[0])
            for (source, head, columns), ring in zip(sources[i], self.smem.rings[i], strict=True):
                plgpu.copy_gmem_to_smem(source.at[tile, head, *columns], ring.at[stage], self.full[i].at[stage])

    def _in_pool(self, slot: Any) -> Any:
        matrix = self.pool.at[slot, self.head]
        return matrix.at[:, self.values] if self.config.axis else matrix.at[self.values]

    def _load_state(self, tile: Any) -> list[Array]:
        """Return the state before a tile from the pool, or zeros where a sequence begins."""
        goes_on = self.marks.begins[tile] == 0

        @pl.when(goes_on)
        def _():
            plgpu.copy_gmem_to_smem(self._in_pool(self.marks.reads[tile]), self.matrix, self.state_full)
            plgpu.barrier_wait(self.state_full)

        @pl.when(jnp.logical_not(goes_on))
        def _():
            for columns in self.slices:
                shape = self.matrix.shape[0], columns.size
                self.matrix[:, columns] = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)

        state = [plgpu.load(self.matrix.at[:, columns], layout=MATRIX) for columns in self.slices]
        plgpu.commit_smem()  # its halves take its place
        return state

    def _step(self, tile: Any, state: list[Array]) -> list[Array]:
        """Compute what a tile's tokens read, and return the state after them."""
        smem = self.smem
        first, second, third = (lax.rem(tile, ring[0].shape[0]) for ring in smem.rings)  # the stages of rings
        # Unless these are opaque to LLVM, it computes all matrix descriptors first and holds them in registers.
        tile, first, second, third, zero = lax.optimization_barrier((tile, first, second, third, jnp.int32(0)))
        halves, deltas = smem.state[1].at[zero], smem.deltas.at[zero]
        factors: Any = self.products.q_factor, self.products.k_factor
        q_factor, k_factor = (load_vector(x.at[tile, self.head], OF_ROWS) for x in factors)
        decay = self._decay(tile)
        state = lax.cond(self.marks.is_loaded[tile] > 0, lambda _: self._load_state(tile), lambda state: state, state)
        for columns, sliced in zip(self.slices, state, strict=True):
            store_halves(halves.at[:, columns], sliced)
        plgpu.commit_smem()
        states = [x if self.config.axis else x.T for x in halves_of(halves)]

        plgpu.barrier_wait(self.full[0].at[first])
        queried = product(parts_of(smem.q.at[first]), states)
        taken = None if smem.w is None else product(parts_of(smem.w.at[first]), states)
        plgpu.barrier_wait(self.full[1].at[second])
        added, delta = [smem.u.at[second]], None
        if taken is not None:
            delta = self._load_added(second) - taken
            added = halves_of(deltas)
            store_halves(deltas, delta)
            plgpu.commit_smem()
            self._prefetch(0, tile + smem.q.shape[0])
        queried = queried * spread(q_factor, queried.shape, 0)
        read = _add_product(queried, parts_of(smem.scores.at[second]), added, self.config.interpret)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.read[...] = read.astype(smem.read.dtype)
        # Without w it is loaded only now: a wide state leaves few registers.
        delta = self._load_added(second) if delta is None else delta
        store_halves(deltas, delta * spread(k_factor, delta.shape, 0))
        plgpu.commit_smem()
        if taken is None:
            self._prefetch(0, tile + smem.q.shape[0])
        self._prefetch(1, tile + smem.u.shape[0])
        self._send_read(tile)

        plgpu.barrier_wait(self.full[2].at[third])
        state = self._advance(state, decay, parts_of(smem.k.at[third]), halves_of(deltas))
        plgpu.commit_smem()  # all threads are done with the tile
        self._prefetch(2, tile + smem.k.shape[0])
        self._keep_state(tile, state)
        return state

    def _decay(self, tile: Any) -> Array:
        """Return the state's factor, or a vector of factors of its rows."""
        decay: Any = self.products.decay
        has_vector = decay.shape[2] > 1
        return load_vector(decay.at[tile, self.head], OF_ROWS) if has_vector else decay[tile, self.head, 0]

    def _load_added(self, stage: Any) -> Array:
        return plgpu.load(self.smem.u.at[stage], layout=MATRIX).astype(jnp.float32)

    def _send_read(self, tile: Any) -> None:
        """Start to store the outputs of a tile's tokens."""
        rows = pl.ds(pl.multiple_of(tile * TILE_ROWS, TILE_ROWS), TILE_ROWS)
        value_dim = self.out.shape[1] // self.pool.shape[1]
        columns = pl.ds(pl.multiple_of(self.head * value_dim + self.values.start, PART), PART)
        plgpu.copy_smem_to_gmem(self.smem.read, self.out.at[rows, columns])

    def _advance(self, state: list[Array], decay: Array, keys: list[Any], added: list[Any]) -> list[Array]:
        """Return the state after a tile's tokens, which add `added` under their keys."""
        lefts, rights = (keys, added) if self.config.axis else (added, keys)
        lefts, after = [x.T for x in lefts], list[Array]()
        for columns, sliced in zip(self.slices, state, strict=True):
            decayed = sliced * (spread(decay, sliced.shape, 0) if decay.ndim else decay)
            after.append(_add_product(decayed, lefts, [x.at[:, columns] for x in rights], self.config.interpret))
        return after

    def _keep_state(self, tile: Any, state: list[Array]) -> None:
        """Store the state after a tile in its slots, if it is to be kept."""

        @pl.when(self.marks.is_kept[tile] > 0)
        def _():
            for columns, sliced in zip(self.slices, state, strict=True):
                self.matrix[:, columns] = sliced
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.matrix, self._in_pool(self.marks.writes[tile]))

            @pl.when(self.marks.copies[tile] > 0)
            def _():
                plgpu.copy_smem_to_gmem(self.matrix, self._in_pool(self.marks.copies[tile]))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_halves(target: Any, value: Array) -> None:
    """Store a float32 matrix [r, k] as bfloat16 halves, the upper one above, in a Ref [2 r, k]."""
    upper, lower = halves_of(target)
    rounded = value.astype(jnp.bfloat16)
    upper[...] = rounded
    lower[...] = (value - rounded.astype(jnp.float32)).astype(jnp.bfloat16)


def halves_of(ref: Any) -> list[Any]:
    """Return Refs to the upper and the lower half that `store_halves` stored."""
    rows = ref.shape[0] // 2
    return [ref.at[pl.ds(0, rows)], ref.at[pl.ds(rows, rows)]]


def parts_of(ref: Any) -> list[Any]:
    """Return Refs to a tile's matrix: to its two halves if it has 128 rows, else to all of its 64."""
    return [ref.at[pl.ds(start, TILE_ROWS)] for start in range(0, ref.shape[0], TILE_ROWS)]


def _multiply(accumulator: Any, lefts: Sequence[Any], rights: Sequence[Any]) -> None:
    """Add the product of two matrices, each in one or two halves, to an accumulator, without that of lower halves."""
    for i, left in enumerate(lefts):
        for right in rights[: max(len(lefts), len(rights)) - i]:
            plgpu.wgmma(accumulator, left, right)


def product(lefts: Sequence[Any], rights: Sequence[Any]) -> Array:
    """Return the float32 product of two matrices, each in one or two halves, without that of lower halves."""

    def multiply(accumulator: Any) -> Array:
        _multiply(accumulator, lefts, rights)
        return accumulator[...]

    shape = lefts[0].shape[0], rights[0].shape[1]
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _add_product(value: Array, lefts: Sequence[Any], rights: Sequence[Any], interpret: bool) -> Array:
    """Return a float32 matrix plus a `product`. The interpreter's accumulators cannot start from a value."""
    if interpret:
        return value + product(lefts, rights)
    start: Any = plgpu.WGMMAAccumulatorRef.init(value)
    return pl.run_state(partial(_multiply, lefts=lefts, rights=rights))(start)

"""The kernel for TPUs: a step of the grid is one head of a tile of queries and one of the tiles of keys that it sees.

The softmax is that of paged attention. The number of steps of a tile of queries is the most that any of them needs; in
steps beyond its own number nothing is fetched or computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.paged_attention.tpu import softmax
from pallas_kernels.paged_attention.tpu.options import LANES, Options

from .shape import SegmentShape

_MOST_ROWS = 512
"""The most rows of a tile of queries, and of one of keys."""
_MAX_HEAD = 256


class _Bounds(NamedTuple):
    """The bounds of the tiles of queries, in SMEM."""

    firsts_i: Any
    """The first tile of keys that each tile sees."""
    stops_i: Any
    """One past the last tile of keys that it sees."""
    latest_starts_i: Any
    """The latest start of its rows: earlier keys are hidden from some of them."""
    least_ends_i: Any
    """The least end of its rows."""


def refusal(shape: SegmentShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.head_dim > _MAX_HEAD:
        return f"heads must have at most {_MAX_HEAD} numbers, not {shape.head_dim}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {shape.dtype.name}"
    return None


def tpu_segment_attention(
    q_pnh: Array,
    k_pnh: Array,
    v_pnh: Array,
    starts_p: Array,
    ends_p: Array,
    *,
    scale: float,
    longest: int,
    interpret: bool,
) -> Array:
    """See `SegmentAttention`."""
    del longest
    p, n, h = q_pnh.shape
    rows = min(_MOST_ROWS, -(-p // LANES) * LANES)
    # Heads of at most 64 numbers have key and value side by side in 128 lanes.
    shares = 2 * h <= LANES
    width = LANES if shares else -(-h // LANES) * LANES
    keys = slice(0, width)
    values = keys if shares else slice(width, 2 * width)
    options = Options(
        name="segment",
        group=1,
        keys=keys,
        values=values,
        block_size=rows,
        scale=scale,
        soft_cap=None,
        has_pairs=False,
        has_sinks=False,
        has_row_ends=False,
        has_chosen=False,
        unpacks_float8=False,
        tiles=Tiles(decode=1, query=rows, kv=rows),
        interpret=interpret,
    )
    is_used_p = starts_p < ends_p
    # 0 x NaN is NaN.
    v_pnh = jnp.where(is_used_p[:, None, None], v_pnh, 0)
    # Padding sees nothing: it starts beyond all rows.
    starts_p, ends_p = jnp.where(is_used_p, starts_p, p), jnp.where(is_used_p, ends_p, 0)
    more = -p % rows
    starts_p, ends_p = jnp.pad(starts_p, (0, more), constant_values=p), jnp.pad(ends_p, (0, more))

    def by_head(x_pnh: Array, columns: int) -> Array:
        return jnp.pad(x_pnh, ((0, more), (0, 0), (0, columns - x_pnh.shape[2]))).swapaxes(0, 1)

    halves = (h, LANES - h) if shares else (width, width)
    q_npc = by_head(q_pnh, width)
    kv_npc = jnp.concatenate([by_head(x, half) for x, half in zip((k_pnh, v_pnh), halves, strict=True)], axis=2)
    starts_ir, ends_ir = starts_p.reshape(-1, rows), ends_p.reshape(-1, rows)
    stops_i = (ends_ir.max(axis=1) + rows - 1) // rows
    firsts_i = jnp.minimum(starts_ir.min(axis=1) // rows, stops_i)
    bounds = _Bounds(firsts_i, stops_i, starts_ir.max(axis=1), ends_ir.min(axis=1))

    def kv_index(head: Array, tile: Array, step: Array, firsts_i: Any, stops_i: Any, *_: Any) -> tuple[Any, Any, int]:
        last = lax.max(stops_i[tile] - 1, 0)
        return head, lax.min(firsts_i[tile] + step, last), 0

    def body(*refs: Any) -> None:
        _attend(options, rows, _Bounds(*refs[:4]), *refs[4:])

    out_npc = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(bounds),
            # Padding alone takes a step too, which writes its zeros.
            grid=(n, len(stops_i), lax.max((stops_i - firsts_i).max(), 1)),
            in_specs=[
                pl.BlockSpec((None, rows, width), lambda head, tile, *_: (head, tile, 0)),
                pl.BlockSpec((None, rows, kv_npc.shape[2]), kv_index),
                pl.BlockSpec((rows, 2), lambda _, tile, *__: (tile, 0)),
            ],
            out_specs=pl.BlockSpec((None, rows, width), lambda head, tile, *_: (head, tile, 0)),
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_npc.shape, q_pnh.dtype),
        name="segment_attention",
        **options.pallas_options(),
    )(*bounds, q_npc, kv_npc, jnp.stack((starts_p, ends_p), axis=1))
    first = h if shares else 0
    return out_npc[:, :p, first : first + h].swapaxes(0, 1)


def _attend(
    options: Options, rows: int, bounds: _Bounds, q_rc: Any, kv_tc: Any, bounds_r2: Any, out_rc: Any, *state: Any
) -> None:
    """Attend a tile of keys, and store the result after the last step."""
    tile, step = pl.program_id(1), pl.program_id(2)
    state = softmax.State(*state)
    pl.when(step == 0)(lambda: softmax.start(state, None))
    number = bounds.firsts_i[tile] + step
    first_key, end_key = number * rows, (number + 1) * rows
    is_partial = (first_key < bounds.latest_starts_i[tile]) | (end_key > bounds.least_ends_i[tile])
    is_seen = number < bounds.stops_i[tile]

    def attend(keep_rt: Array | None) -> None:
        softmax.attend(state, [softmax.Operands(q_rc[...], (kv_tc[...],), keep_rt)], options)

    @pl.when(is_seen & ~is_partial)
    def _() -> None:
        attend(None)

    @pl.when(is_seen & is_partial)
    def _() -> None:
        keys_rt = lax.broadcasted_iota(jnp.int32, (rows, rows), 1) + first_key
        attend((keys_rt >= bounds_r2[:, 0:1]) & (keys_rt < bounds_r2[:, 1:2]))

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        out_rc[...] = softmax.result(state, options).astype(out_rc.dtype)

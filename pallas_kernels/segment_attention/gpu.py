"""The kernel for Hopper, in the shape of FlashAttention-3.

One program is one head of a tile of 128 rows. Warpgroups 0 and 1 take 64 rows each and alternate, one in its softmax
while the other has the tensor cores; warpgroup 2 loads the tiles of K and V that the rows see through a ring of stages.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import (
    LOG2_E,
    MMA_ROWS,
    SMEM_BYTES,
    SMEM_RESERVED,
    TINY,
    along_rows,
    compiler_params,
    interpret_params,
    tiled_smem,
)
from pallas_kernels.paged_attention.gpu.turns import Turns

from .shape import SegmentShape

_COMPUTE_WARPGROUPS = 2
_PRODUCER = _COMPUTE_WARPGROUPS
_TILE = _COMPUTE_WARPGROUPS * MMA_ROWS
"""The rows of a tile of queries, and of one of keys."""
_COLUMNS = 32
"""A head is padded to a multiple of this many numbers: 64 bytes, in which shared memory is swizzled."""
_MAX_HEAD = 128
# 2 x 224 + 56 = 504 registers: the limit for a thread of each warpgroup together.
_COMPUTE_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_MAX_STAGES = 4


class _Config(NamedTuple):
    """The settings that the kernel is compiled for, besides the shapes of its operands."""

    width: int
    """The numbers of a head, with padding."""
    scale: float
    interpret: bool

    @property
    def stages(self) -> int:
        """Return the number of stages that fit in the shared memory."""
        tile_bytes = _TILE * self.width * 2
        return min(_MAX_STAGES, (SMEM_BYTES - SMEM_RESERVED - tile_bytes) // (2 * tile_bytes))


class _Operands(NamedTuple):
    """The refs in global memory."""

    q_pc: Any
    """The queries [p, n * width], p a multiple of a tile."""
    k_pc: Any
    v_pc: Any
    starts_p: Any
    ends_p: Any
    firsts_i: Any
    """The first tile of keys that each tile of queries sees."""
    stops_i: Any
    """One past the last tile of keys that it sees."""
    latest_starts_w: Any
    """The latest start of the rows of each warpgroup: earlier keys are hidden from some of them."""
    least_ends_w: Any
    """The least end of the rows of each warpgroup."""
    out_pc: Any


class _Smem(NamedTuple):
    """The refs in SMEM: w compute warpgroups, r rows of one, c rows of a tile of keys, a stages."""

    q_wrh: Any
    k_ach: Any
    v_ach: Any
    probs_wrc: Any


class _Barriers(NamedTuple):
    """The barriers: of filled and emptied stages, per warpgroup or stage, and of the warpgroups' turns."""

    q_w: Any
    k_a: Any
    v_a: Any
    k_free_a: Any
    v_free_a: Any
    turn: Any


class _Program(NamedTuple):
    """The work of one program, with its refs."""

    config: _Config
    operands: _Operands
    smem: _Smem
    barriers: _Barriers
    tile: Array
    columns: Any
    """The columns of its head."""
    first: Array
    stop: Array


def refusal(shape: SegmentShape) -> str | None:
    """Return why the kernel cannot run a shape, or None if it can."""
    if shape.head_dim > _MAX_HEAD:
        return f"heads must have at most {_MAX_HEAD} numbers, not {shape.head_dim}"
    if shape.dtype != jnp.bfloat16:
        return f"dtype must be bfloat16, not {shape.dtype.name}"
    return None


def gpu_segment_attention(
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
    config = _Config(-(-h // _COLUMNS) * _COLUMNS, scale, interpret)
    is_used_p = starts_p < ends_p
    # 0 x NaN is NaN.
    v_pnh = jnp.where(is_used_p[:, None, None], v_pnh, 0)
    # Padding sees nothing: it starts beyond all rows.
    starts_p, ends_p = jnp.where(is_used_p, starts_p, p), jnp.where(is_used_p, ends_p, 0)
    more = -p % _TILE
    sizes = (0, more), (0, 0), (0, config.width - h)
    arrays = [jnp.pad(x, sizes).reshape(p + more, n * config.width) for x in (q_pnh, k_pnh, v_pnh)]
    starts_p, ends_p = jnp.pad(starts_p, (0, more), constant_values=p), jnp.pad(ends_p, (0, more))
    starts_wr, ends_wr = starts_p.reshape(-1, MMA_ROWS), ends_p.reshape(-1, MMA_ROWS)
    first_starts_i = starts_p.reshape(-1, _TILE).min(axis=1)
    last_ends_i = ends_p.reshape(-1, _TILE).max(axis=1)
    stops_i = (last_ends_i + _TILE - 1) // _TILE

    def body(*refs: Any, smem: _Smem, barriers: _Barriers) -> None:
        _run(config, _Operands(*refs), smem, barriers)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(arrays[0].shape, q_pnh.dtype),
        # Tiles of queries run side by side and share the K and V of their head in the L2 cache.
        grid=(n, len(stops_i)),
        grid_names=("head", "tile"),
        num_threads=_COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types={"smem": _smem(config), "barriers": _barriers(config)},
        kernel_name="segment_attention",
        compiler_params=compiler_params(),
        interpret=interpret_params(interpret),
    )
    out_pc = kernel(
        *arrays,
        starts_p,
        ends_p,
        jnp.minimum(first_starts_i // _TILE, stops_i),
        stops_i,
        starts_wr.max(axis=1),
        ends_wr.min(axis=1),
    )
    return out_pc.reshape(p + more, n, config.width)[:p, :, :h]


def _smem(config: _Config) -> _Smem:
    rows, ring = (_COMPUTE_WARPGROUPS, MMA_ROWS), (config.stages, _TILE, config.width)
    return _Smem(
        q_wrh=tiled_smem((*rows, config.width), jnp.bfloat16),
        k_ach=tiled_smem(ring, jnp.bfloat16),
        v_ach=tiled_smem(ring, jnp.bfloat16),
        probs_wrc=tiled_smem((*rows, _TILE), jnp.bfloat16) if config.interpret else None,
    )


def _barriers(config: _Config) -> _Barriers:
    both, stages = _COMPUTE_WARPGROUPS, config.stages
    return _Barriers(
        q_w=plgpu.Barrier(num_barriers=both),
        k_a=plgpu.Barrier(num_barriers=stages),
        v_a=plgpu.Barrier(num_barriers=stages),
        k_free_a=plgpu.Barrier(num_arrivals=both, num_barriers=stages),
        v_free_a=plgpu.Barrier(num_arrivals=both, num_barriers=stages),
        turn=plgpu.Barrier(num_arrivals=both),
    )


def _run(config: _Config, operands: _Operands, smem: _Smem, barriers: _Barriers) -> None:
    warpgroup, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
    columns = pl.ds(pl.multiple_of(lax.axis_index("head") * config.width, config.width), config.width)
    first, stop = operands.firsts_i[tile], operands.stops_i[tile]
    program = _Program(config, operands, smem, barriers, tile, columns, first, stop)

    @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        _compute(program, warpgroup)

    @pl.when(warpgroup == _PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _produce(program)


def _rows(tile: Array) -> Any:
    """Return the rows of a tile."""
    return pl.ds(pl.multiple_of(tile * _TILE, _TILE), _TILE)


def _compute(program: _Program, warpgroup: Array) -> None:
    """Attend 64 rows."""
    config, operands, smem, barriers = program[:4]
    half = program.tile * _COMPUTE_WARPGROUPS + warpgroup
    rows = pl.ds(pl.multiple_of(half * MMA_ROWS, MMA_ROWS), MMA_ROWS)
    latest_start, least_end = operands.latest_starts_w[half], operands.least_ends_w[half]
    q_rh = smem.q_wrh.at[warpgroup]
    plgpu.copy_gmem_to_smem(operands.q_pc.at[rows, program.columns], q_rh, barriers.q_w.at[warpgroup])
    plgpu.barrier_wait(barriers.q_w.at[warpgroup])

    def weigh(scores_rc: Array, tile: Array) -> tuple[Array, float]:
        is_partial = (tile * _TILE < latest_start) | ((tile + 1) * _TILE > least_end)
        mask = partial(_mask, operands, rows, tile * _TILE)
        return lax.cond(is_partial, mask, lambda x: x, scores_rc), config.scale * LOG2_E

    turns = Turns(warpgroup, smem, barriers)
    acc_rh, _, sum_r = turns.attend(program.first, program.stop, program.stop, weigh)

    q_rh[...] = (acc_rh * along_rows(1.0 / jnp.maximum(sum_r, TINY), acc_rh)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_rh, operands.out_pc.at[rows, program.columns])
    plgpu.wait_smem_to_gmem(0)


def _mask(operands: _Operands, rows: Any, first_key: Array, scores_rc: Array) -> Array:
    """Hide the keys outside of each row's segment."""
    layout = plgpu.Layout.WGMMA
    starts_r, ends_r = (
        plgpu.load(bounds.at[rows], layout=layout.reduce(1), optimized=False)
        for bounds in (operands.starts_p, operands.ends_p)
    )
    keys_rc = plgpu.broadcasted_iota(jnp.int32, scores_rc.shape, 1, layout=layout) + first_key
    is_seen_rc = (keys_rc >= along_rows(starts_r, scores_rc)) & (keys_rc < along_rows(ends_r, scores_rc))
    return jnp.where(is_seen_rc, scores_rc, -jnp.inf)


def _produce(program: _Program) -> None:
    """Keep the stages full."""
    config, operands, smem, barriers = program[:4]

    @pl.loop(program.first, program.stop)
    def _(tile: Array) -> None:
        number = tile - program.first
        stage = lax.rem(number, config.stages)
        for source, target, filled, free in (
            (operands.k_pc, smem.k_ach, barriers.k_a, barriers.k_free_a),
            (operands.v_pc, smem.v_ach, barriers.v_a, barriers.v_free_a),
        ):
            pl.when(number >= config.stages)(partial(plgpu.barrier_wait, free.at[stage]))
            plgpu.copy_gmem_to_smem(source.at[_rows(tile), program.columns], target.at[stage], filled.at[stage])

    if not config.interpret:
        return

    # jax 0.11's interpreter requires that a waiting thread sees all phases of a barrier.
    @pl.loop(lax.max(program.stop - config.stages, program.first), program.stop)
    def _(tile: Array) -> None:
        stage = lax.rem(tile - program.first, config.stages)
        plgpu.barrier_wait(barriers.k_free_a.at[stage])
        plgpu.barrier_wait(barriers.v_free_a.at[stage])

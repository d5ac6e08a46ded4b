"""Make steps of paged attention on the device, and compute plain XLA's result for them.

All data is random, and unwritten slots of the pool are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.resolve.resolve_ops import device_facts
from lib.machine import jax_platform
from pallas_kernels.paged_attention import (
    NO_WINDOW,
    AttentionBatch,
    FusedPool,
    KVPool,
    PagedAttention,
    Rope,
    SplitPool,
    pick,
)
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.tiles import XLA_TILES

NUM_LAYERS, LAYER = 2, 1
ALLOWED = 2**-6
"""The largest error of a row, relative to its root mean square: a few roundings to bfloat16, of 2**-9 each.
Leaving out one KV tile in 64 makes it 2**-3.
"""
type Chunks = Sequence[tuple[int, int]]
"""Pairs of the length of a context and of the chunk at its end that a step computes."""


class Settings(NamedTuple):
    """The static settings of a model's attention."""

    window: int
    scale: float
    soft_cap: float | None


class Inputs(NamedTuple):
    """The op's arguments besides the pool."""

    q_tnh: Array
    k_tkh: Array
    v_tkh: Array
    batch: AttentionBatch
    rope: Rope
    """Tables of few bits: products are exact, and a sum has the same bits with and without fused multiply-add."""
    sinks_n: Array | None


class Workload(NamedTuple):
    """A step, the pool before it, and the model's settings."""

    inputs: Inputs
    pool: FusedPool
    settings: Settings
    xla_batch: AttentionBatch
    """The same step in plain XLA's tiles."""


def pick_kernels(case: Case, block_size: int, kv_dtype: Any, implementation: str | None) -> PagedAttention:
    """Return the op with the device's own kernels, or with an implementation's interpreted ones.

    Raises ValueError where they cannot run the shape.
    """
    platform = jax_platform()
    shape = case.shape(block_size, jnp.bfloat16, kv_dtype)
    op, reason = pick(shape, platform, implementation, **device_facts(jax.devices()))
    if op.implementation not in ("gpu", "tpu"):
        raise ValueError(f"there are no kernels of a {platform} for this shape: {reason}")
    return op


def make_workload(
    op: PagedAttention, case: Case, chunks: Chunks, *, like: Chunks | None = None, seed: int = 0
) -> Workload:
    """Make a step for the op. The order of the pool's blocks is random too.

    With `like`, the batch is padded to that workload's shapes, to share its programs. A step of decodes alone is as the
    engine makes it.
    """
    rng, o = np.random.default_rng(seed), op.shape.block_size
    counts, like_counts = ([-(-length // o) for length, _ in each] for each in (chunks, like or chunks))
    num_blocks = 1 + sum(like_counts)
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    layout = {"block_size": o, "row_alignment": op.row_alignment, "padding": len(like_counts) - len(counts)}
    batch, xla_batch = (
        _widened(ragged_batch(chunks, blocks, query_tile=query_tile, **layout), max(like_counts) + 1)
        for query_tile in (op.tiles.query, XLA_TILES.query)
    )
    if op.takes_decodes_alone and all(chunk == 1 for _, chunk in chunks):
        batch = batch.without_tiles()
    is_written_bo = np.zeros((num_blocks, o), bool)
    for (length, chunk), owned in zip(chunks, blocks, strict=True):
        is_written_bo[owned] = np.arange(len(owned) * o).reshape(-1, o) < length - chunk
    keys = jax.random.split(jax.random.key(seed), 6)
    t, h, heads = len(batch.slots_t), case.head_dim, (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    q, k, v = (jax.random.normal(key, (t, n, h), jnp.bfloat16) for key, n in zip(keys[:3], heads, strict=True))
    angles_th = jax.random.uniform(keys[3], (t, h // 2), maxval=2 * jnp.pi)
    cos, sin = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (jnp.cos(angles_th), jnp.sin(angles_th)))
    sinks_n = jax.random.normal(keys[4], (case.num_heads,)) if case.has_sinks else None
    pool = FusedPool(_random_pool(keys[5], is_written_bo, spec=op.pool_spec(NUM_LAYERS, num_blocks)[0]))
    settings = Settings(case.window or NO_WINDOW, h**-0.5, case.soft_cap)
    return Workload(Inputs(q, k, v, batch, Rope(cos, sin), sinks_n), pool, settings, xla_batch)


def _widened(batch: AttentionBatch, width: int) -> AttentionBatch:
    """Return a batch on the device, with block tables of a width."""
    tables_sm = np.asarray(batch.block_tables_sm)
    num_missing: int = width - tables_sm.shape[1]
    wide_sm = np.pad(tables_sm, ((0, 0), (0, num_missing)))
    return jax.tree.map(jnp.asarray, batch._replace(block_tables_sm=wide_sm))


@partial(jax.jit, static_argnames="spec")
def _random_pool(key: Array, is_written_bo: Array, *, spec: jax.ShapeDtypeStruct) -> Array:
    block = spec.shape[1:]
    # Layer by layer: the whole pool may have more numbers than 32 bits can count.
    layer = lambda key: jax.random.normal(key, (len(is_written_bo), *block), jnp.bfloat16).astype(spec.dtype)  # noqa: E731
    kv_lbkoc = jax.vmap(layer)(jax.random.split(key, NUM_LAYERS))
    kv_lbkoc = jnp.where(is_written_bo[:, None, :, None], kv_lbkoc, jnp.asarray(jnp.nan, spec.dtype))
    return kv_lbkoc.reshape(spec.shape)


def attend(
    op: PagedAttention, settings: Settings, inputs: Inputs, pool: KVPool, layer: Array | int, num_layers: int
) -> tuple[Array, Any]:
    """Call an op; traced."""
    q, k, v, batch, rope, sinks_n = inputs
    layers = {"layer": layer, "num_layers": num_layers}
    return op(q, k, v, pool, batch, rope=rope, sinks_n=sinks_n, **layers, **settings._asdict())


@partial(jax.jit, static_argnames=("op", "settings"), donate_argnames="pool")
def run_op(op: PagedAttention, settings: Settings, inputs: Inputs, pool: FusedPool) -> tuple[Array, FusedPool]:
    """Run a step on LAYER; the pool is donated."""
    return attend(op, settings, inputs, pool, LAYER, NUM_LAYERS)


def xla_answer(op: PagedAttention, work: Workload) -> tuple[Array, FusedPool]:
    """Return plain XLA's output and LAYER of the pool. The workload stays as it is."""
    xla, _ = pick(op.shape, jax_platform(), "xla")
    return _run_xla(xla, work.settings, work.inputs._replace(batch=work.xla_batch), work.pool)


@partial(jax.jit, static_argnames=("xla", "settings"))
def _run_xla(xla: PagedAttention, settings: Settings, inputs: Inputs, pool: FusedPool) -> tuple[Array, FusedPool]:
    kv, h = layer_of(pool).kv, xla.shape.head_dim
    parts = (kv[..., :h].swapaxes(-1, -2), kv[..., h:])
    held = zip(parts, xla.pool_spec(1, len(kv)), strict=True)
    split = SplitPool(*(lax.bitcast_convert_type(x, spec.dtype) for x, spec in held))
    out_tnh, after = attend(xla, settings, inputs, split, 0, 1)
    return out_tnh, FusedPool.of(SplitPool(*(lax.bitcast_convert_type(x, kv.dtype) for x in after)))


def layer_of(pool: FusedPool) -> FusedPool:
    """Return LAYER of a pool."""
    num_blocks = len(pool.kv) // NUM_LAYERS
    return FusedPool(pool.kv[LAYER * num_blocks : (LAYER + 1) * num_blocks])


def compare(work: Workload, got: tuple[Array, FusedPool], expected: tuple[Array, FusedPool]) -> dict[str, Any]:
    """Return the largest error of a row, relative to its root mean square, and the failed checks.

    `got` has the pool of all layers, `expected` of LAYER.
    """
    rows = np.flatnonzero(work.inputs.batch.slots_t)
    out, answer = (x[rows].astype(jnp.float32) for x in (got[0], expected[0]))
    size = lambda x: jnp.sqrt(jnp.mean(x * x, axis=-1))  # noqa: E731
    error = float(jnp.max(size(out - answer) / size(answer)))
    missed = [] if error <= ALLOWED else [f"error {error:.1e}, allowed {ALLOWED:.1e}"]
    if not pools_are_equal(got[1], expected[1]):
        missed.append("the pool differs")
    if not jnp.isfinite(got[0]).all():
        missed.append("padding is not finite")
    return {"error": round(error, 5), "missed": missed}


@jax.jit
def pools_are_equal(pool: FusedPool, expected: FusedPool) -> Array:
    """Compare LAYER of a pool with the expected one, to the bit except for the null block."""
    got, want = (x.kv[1:].astype(jnp.float32) for x in (layer_of(pool), expected))
    return jnp.array_equal(got, want, equal_nan=True)


def cross_check(op: PagedAttention, case: Case, chunks: Chunks, *, seed: int = 0) -> dict[str, Any]:
    """Run a step in the kernels and in plain XLA, and return the result of `compare`."""
    work = make_workload(op, case, chunks, seed=seed)
    expected = xla_answer(op, work)
    return compare(work, run_op(op, work.settings, work.inputs, work.pool), expected)


def ragged_decodes(num_seqs: int, longest: int, *, seed: int = 0) -> list[tuple[int, int]]:
    """Return decodes of random contexts, the longest possible first."""
    lengths = np.random.default_rng(seed).integers(1, longest, num_seqs)
    return [(longest, 1), *((int(length), 1) for length in lengths[1:])]


def write_kv(op: PagedAttention, inputs: Inputs, pool: FusedPool, layer: Array | int) -> FusedPool:
    """Rotate, and write K and V, in the kernel that a GPU has for it; traced."""
    from pallas_kernels.paged_attention.gpu.write import rotate_and_write

    q, k, v, batch, rope, _ = inputs
    num_rows = len(batch.context_lens_s)
    layers: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS}
    return rotate_and_write(q, k, v, pool, batch.slots_t, rope, num_rows=num_rows, interpret=op.interpret, **layers)[1]

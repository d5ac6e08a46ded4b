"""Measure attention over latents on this machine's GPU or TPU, and compare it with the device's peaks.

Decode is compared with the bandwidth of a plain copy, prefill with the rate of a large matmul, both measured here, all
on random data, with NaN in unwritten slots. Times are the device's own, by the profiler; outputs and the pool
are compared with plain XLA's. --dry-run IMPLEMENTATION runs toy sizes on a CPU in the kernels' interpreter; its figures
mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from lib.device_time import Timing, measure_peaks, time_calls
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device, jax_platform
from lib.workloads import ALLOWED, LAYER, NUM_LAYERS, Chunks

from bench.kernels import DECODES, PREFILLS, figures
from jaxllm.resolve.resolve_ops import device_facts
from pallas_kernels.latent_attention import LatentAttention, LatentPool, pick
from pallas_kernels.latent_attention.cases import CASES
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.tiles import XLA_TILES

MODELS = ("deepseek-v2-lite", "kimi-k2", "mistral-small-4")
KINDS = ("decode", "prefill")
type Row = dict[str, Any]


class Workload(NamedTuple):
    """A step, and the pool before it."""

    q_tnh: Array
    latents_th: Array
    pool: LatentPool
    batch: AttentionBatch
    xla_batch: AttentionBatch
    """The same step in plain XLA's tiles."""


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--models", nargs="+", choices=CASES, default=MODELS, metavar="MODEL")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_device())
    peaks = measure_peaks(is_dry=bool(args.dry_run))
    evidence.note(peaks=peaks)
    for model in args.models[: 1 if args.dry_run else None]:
        shape = CASES[model].shape(16 if args.dry_run else args.block_size)
        op, reason = pick(shape, jax_platform(), args.dry_run, **device_facts(jax.devices()))
        if op.implementation == "xla":
            evidence.add({"model": model, "missed": [f"plain XLA: {reason}"]})
            continue
        for kind in args.only:
            for row in measure(kind, op, peaks, 1 if args.dry_run else args.repeats, is_dry=bool(args.dry_run)):
                evidence.add({"kind": kind, "model": model} | row)
    return evidence.finish()


def measure(kind: str, op: LatentAttention, peaks: dict[str, float], repeats: int, *, is_dry: bool) -> Iterator[Row]:
    """Yield the bandwidth of decodes, in bytes of latents that must be read, or the rate of prefills."""
    shape = op.shape
    if kind == "decode":
        for num_seqs, context in ((2, 40),) if is_dry else DECODES:
            timing, checked = run(op, [(context, 1)] * num_seqs, repeats)
            gigabytes = num_seqs * context * shape.key_dim * jnp.dtype(shape.kv_dtype).itemsize / 1e9
            rate = figures(timing, "gb_per_s", gigabytes, peaks["copy_gb_per_s"])
            yield {"seqs": num_seqs, "context": context} | rate | checked
        return
    for length in (20,) if is_dry else PREFILLS:
        timing, checked = run(op, [(length, length)], repeats)
        numbers = shape.num_heads * (shape.key_dim + shape.latent_dim)
        rate = figures(timing, "tflop_per_s", length * (length + 1) * numbers / 1e12, peaks["matmul_tflop_per_s"])
        yield {"tokens": length} | rate | checked


def run(op: LatentAttention, chunks: Chunks, repeats: int) -> tuple[Timing, Row]:
    """Time a step, and compare it with plain XLA's."""
    work = make_workload(op, chunks)
    xla, _ = pick(op.shape, jax_platform(), "xla")
    arguments = work.q_tnh, work.latents_th
    want_tnl, want = attend(xla, *arguments, LatentPool(work.pool.latents.copy()), work.xla_batch)
    state = [(want_tnl, work.pool)]

    def once() -> tuple[Array, LatentPool]:
        state[0] = attend(op, *arguments, state[0][1], work.batch)
        return state[0]

    timing = time_calls(once, repeats=repeats)
    got_tnl, pool = state[0]
    rows = np.flatnonzero(work.batch.slots_t)
    out, answer = (x[rows].astype(jnp.float32) for x in (got_tnl, want_tnl))
    size = lambda x: jnp.sqrt(jnp.mean(x * x, axis=-1))  # noqa: E731
    error = float(jnp.max(size(out - answer) / size(answer)))
    missed = [] if error <= ALLOWED else [f"error {error:.1e}, allowed {ALLOWED:.1e}"]
    if not pools_are_equal(pool.latents, want.latents):
        missed.append("the pool differs")
    if not jnp.isfinite(got_tnl).all():
        missed.append("padding is not finite")
    return timing, {"error": round(error, 5), "missed": missed}


def make_workload(op: LatentAttention, chunks: Chunks) -> Workload:
    """Make a step for the op; steps of decodes alone are as the engine makes them. The blocks have a random order."""
    rng, o, shape = np.random.default_rng(0), op.shape.block_size, op.shape
    counts = [-(-length // o) for length, _ in chunks]
    num_blocks = 1 + sum(counts)
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    layout = {"block_size": o, "row_alignment": op.row_alignment}
    batch, xla_batch = (
        jax.tree.map(jnp.asarray, ragged_batch(chunks, blocks, query_tile=query_tile, **layout))
        for query_tile in (op.tiles.query, XLA_TILES.query)
    )
    if op.takes_decodes_alone and all(chunk == 1 for _, chunk in chunks):
        batch = batch.without_tiles()
    is_written_bo = np.zeros((num_blocks, o), bool)
    for (length, chunk), owned in zip(chunks, blocks, strict=True):
        is_written_bo[owned] = np.arange(len(owned) * o).reshape(-1, o) < length - chunk
    q_key, latents_key, pool_key = jax.random.split(jax.random.key(0), 3)
    t = len(batch.slots_t)
    # These scores leave softmax neither even nor with a single token.
    q_tnh = jax.random.normal(q_key, (t, shape.num_heads, shape.key_dim), jnp.bfloat16)
    latents_th = jax.random.normal(latents_key, (t, shape.key_dim), jnp.bfloat16)
    pool = _random_pool(pool_key, is_written_bo, shape.key_dim)
    return Workload(q_tnh, latents_th, LatentPool(pool), batch, xla_batch)


@partial(jax.jit, static_argnames="key_dim")
def _random_pool(key: Array, is_written_bo: Array, key_dim: int) -> Array:
    block = *is_written_bo.shape, key_dim
    latents_lboh = jax.random.normal(key, (NUM_LAYERS, *block), jnp.bfloat16)
    latents_lboh = jnp.where(is_written_bo[..., None], latents_lboh, jnp.nan)
    return latents_lboh.reshape(-1, *block[1:])


@partial(jax.jit, static_argnames="op", donate_argnames="pool")
def attend(
    op: LatentAttention, q_tnh: Array, latents_th: Array, pool: LatentPool, batch: AttentionBatch
) -> tuple[Array, LatentPool]:
    """Run a step on LAYER; the pool is donated."""
    layer: dict[str, Any] = {"layer": LAYER, "num_layers": NUM_LAYERS}
    return op(q_tnh, latents_th, pool, batch, scale=op.shape.key_dim**-0.5, **layer)


@jax.jit
def pools_are_equal(pool: Array, expected: Array) -> Array:
    """Compare pools to the bit but for the null blocks."""
    got, want = (x.reshape(NUM_LAYERS, -1, *x.shape[1:])[:, 1:].astype(jnp.float32) for x in (pool, expected))
    return jnp.array_equal(got, want, equal_nan=True)


if __name__ == "__main__":
    sys.exit(main())

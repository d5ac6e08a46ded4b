#!/usr/bin/env python3
"""Compare a CPU's own kernels with plain XLA, in turns: one layer's attention, and the matmuls of all layers.

    scripts/bench_cpu_kernels.py [--case smollm2-135m] [--json OUT]

Figures are medians of the rounds, in milliseconds. Attention gets a pool that does not fit the caches; matmuls get
every layer's own weights, as a step does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import describe_machine
from sheet import print_sheet

from jaxllm.execution.options import compiler_options
from pallas_kernels.linear import linear
from pallas_kernels.paged_attention import AttentionBatch, PagedAttention
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.cases import CASES

ROUNDS = 15
LAYERS = 4
"""How many layers the pool has that attention goes through."""
BLOCK_SIZE = 128
STEPS = {
    "64 decodes at 30 to 300": [(30 + 270 * i // 63, 1) for i in range(64)],
    "64 decodes at 256": [(256, 1)] * 64,
    "1 decode at 256": [(256, 1)],
    "1 decode at 8,000": [(8000, 1)],
    "prefill of 512": [(512, 512)],
    "prefill of 512 at 8,000": [(8000, 512)],
}
MATRICES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""The matrices of each of SmolLM2-135M's layers."""
NUM_LAYERS = 30
ROWS = (4, 64, 512)
NO_WINDOW = 2**30


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="smollm2-135m", help="whose attention (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    rows = [attention_row(args.case, name, chunks) for name, chunks in STEPS.items()]
    rows += [matmul_row(count, dtype) for dtype in (jnp.bfloat16, jnp.float32) for count in ROWS]
    print_sheet(rows)
    if args.json:
        report = {"machine": describe_machine(), "date": date.today().isoformat(), "jax": jax.__version__}
        args.json.write_text(json.dumps(report | {"case": args.case, "rows": rows}, indent=1) + "\n")
    return 0


def attention_row(case: str, name: str, chunks: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the milliseconds of one layer, in bfloat16."""
    shape = CASES[case].shape(block_size=BLOCK_SIZE)
    rng = np.random.default_rng(0)
    counts = [-(-length // BLOCK_SIZE) for length, _ in chunks]
    ids = iter(rng.permutation(np.arange(1, sum(counts) + 1)).tolist())
    blocks = [[next(ids) for _ in range(count)] for count in counts]
    programs, states = {}, {}
    for implementation in ("xla", "cpu"):
        op = PagedAttention(shape, implementation)
        made = ragged_batch(chunks, blocks, block_size=BLOCK_SIZE, query_tile=op.tiles.query, row_alignment=1)
        batch = AttentionBatch(*map(jnp.asarray, made))
        t = len(batch.slots_t)
        q, k, v = (
            jnp.asarray(rng.standard_normal((t, heads, shape.head_dim)), jnp.bfloat16)
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        spec = op.pool_spec(LAYERS, sum(counts) + 1)
        states[implementation] = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), spec)
        run = jax.jit(
            partial(attend_layers, op),
            donate_argnums=3,
            compiler_options=compiler_options("cpu", jnp.bfloat16, True),
        )
        programs[implementation] = partial(run, q, k, v, batch=batch)

    def step(implementation: str) -> None:
        out, states[implementation] = programs[implementation](states[implementation])
        out.block_until_ready()

    return {"what": f"attention, {name}", **in_turns(step, ("xla", "cpu"), 1 / LAYERS)}


def attend_layers(
    op: PagedAttention, q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, batch: AttentionBatch
) -> tuple[jax.Array, Any]:
    """Attend in one layer after the other."""
    for layer in range(LAYERS):
        q, pool = op(
            q, k, v, pool, batch, layer=jnp.int32(layer), num_layers=LAYERS, window=NO_WINDOW, scale=0.125
        )  # fmt: skip
    return q, pool


def matmul_row(num_rows: int, dtype: Any) -> dict[str, Any]:
    """Return the milliseconds of all layers' matmuls."""
    rng = np.random.default_rng(0)
    layers = [
        [jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * 0.02, dtype) for shape in MATRICES]
        for _ in range(NUM_LAYERS)
    ]
    x = jnp.asarray(rng.standard_normal((num_rows, MATRICES[0][1])), dtype)
    ways: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        "xla": partial(jnp.einsum, "tk,nk->tn", precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None),
        "cpu": lambda x, w: linear(x, w[None], 0, dtype),
    }
    # XLA at its quickest: float32 is not batch invariant so.
    options = compiler_options("cpu", dtype, dtype == jnp.bfloat16)
    programs = {name: jax.jit(partial(multiply_layers, way), compiler_options=options) for name, way in ways.items()}
    label = f"matmuls, {num_rows} rows, {jnp.dtype(dtype).name}"
    return {"what": label, **in_turns(lambda name: programs[name](x, layers).block_until_ready(), ("xla", "cpu"), 1)}


def multiply_layers(multiply: Callable[..., jax.Array], x: jax.Array, layers: Any) -> jax.Array:
    """Do one layer's matmuls after the other's."""
    for qkv, out, gate_up, down in layers:
        x = multiply(multiply(x, qkv)[:, : out.shape[1]], out)
        x = multiply(multiply(x, gate_up)[:, : down.shape[1]], down)
    return x


def in_turns(run: Callable[[str], Any], names: tuple[str, str], factor: float) -> dict[str, float]:
    """Return the median milliseconds of each, times a factor, and how many times quicker the second is."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS + 1):
        for name in names:
            start = time.perf_counter()
            run(name)
            times[name].append(time.perf_counter() - start)
    first, second = (statistics.median(times[name][1:]) * 1e3 * factor for name in names)
    return {f"{names[0]} ms": round(first, 2), f"{names[1]} ms": round(second, 2), "times": round(first / second, 1)}


if __name__ == "__main__":
    sys.exit(main())

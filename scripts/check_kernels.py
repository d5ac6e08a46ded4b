#!/usr/bin/env python3
"""Compare the attention kernels with the float32 reference, on the GPU or TPU at hand.

Ragged steps at the shapes of real models: RoPE, decodes, chunks and both, windows, soft caps, sinks, blocks of 16 and
64, pools of 16 and 8 bits whose unused slots are NaN. Exits non-zero if an error is larger than twice that of rounding,
if the pool differs in a bit, or if a second run does. --dry-run IMPLEMENTATION interprets a few of them on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_kernels import describe

from jaxllm.config.resolve import detect_architecture
from pallas_kernels.paged_attention import FusedPool, pick
from pallas_kernels.paged_attention.cases import CASES
from tests.pallas_kernels.steps import LAYER, NO_WINDOW, NUM_LAYERS, SCALE, make_step, reference

STEPS = {
    "decode": [(1, 1), (16, 1), (17, 1), (64, 1), (65, 1), (300, 1), (1029, 1)],
    "prefill": [(33, 33), (64, 20), (150, 47), (290, 3), (257, 129)],
    "mixed": [(1, 1), (130, 1), (300, 1), (2, 2), (64, 20), (200, 140)],
}
DRY_STEPS = {"mixed": [(1, 1), (35, 1), (20, 18)]}


def main() -> int:
    """Check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", metavar="IMPLEMENTATION")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    platform = {"cuda": "gpu"}.get(jax.default_backend(), jax.default_backend())
    report: dict[str, Any] = describe() | {"rows": []}
    for name, case in list(CASES.items())[: 1 if args.dry_run else None]:
        for block_size in (16, 64)[: 1 if args.dry_run else None]:
            for kv_dtype in (jnp.bfloat16, jnp.float8_e4m3fn)[: 1 if args.dry_run else None]:
                shape = case.shape(block_size, jnp.bfloat16, kv_dtype)
                op, reason = pick(shape, platform, args.dry_run, architecture=detect_architecture(jax.devices()))
                if reason is not None:
                    continue
                window = min(case.window or NO_WINDOW, 100)  # shorter than the contexts here
                for kind, chunks in (DRY_STEPS if args.dry_run else STEPS).items():
                    row = {"model": name, "block_size": block_size, "kv": jnp.dtype(kv_dtype).name, "step": kind}
                    row |= check(op, chunks, window if case.window else NO_WINDOW, case.soft_cap, case.has_sinks)
                    report["rows"].append(row)
                    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                    if args.json:
                        args.json.parent.mkdir(parents=True, exist_ok=True)
                        args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [row for row in report["rows"] if row["missed"]]
    print(f"{len(report['rows'])} steps, {len(wrong)} wrong")
    return int(bool(wrong) or not report["rows"])


def check(op: Any, chunks: Any, window: int, soft_cap: float | None, has_sinks: bool) -> dict[str, Any]:
    """Run one step twice and compare."""
    rng = np.random.default_rng(len(chunks))
    step = make_step(rng, chunks, op.shape, query_tile=op.tiles.query, row_alignment=op.row_alignment)
    sinks = rng.standard_normal(op.shape.num_heads).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks}
    exact, exact_pool = reference(step, rope=step.rope, **settings)

    def function(q: Any, k: Any, v: Any, pool: Any, batch: Any, rope: Any) -> Any:
        return op(q, k, v, pool, batch, rope=rope, layer=LAYER, num_layers=NUM_LAYERS, scale=SCALE, **settings)

    arguments = (step.q, step.k, step.v, FusedPool.of(step.pool), step.batch, step.rope)
    runs = [jax.jit(function)(*arguments) for _ in range(2)]
    (out, pool), (again, _) = [(np.asarray(out, np.float32), np.asarray(pool.kv, np.float32)) for out, pool in runs]
    rows = step.rows
    error = float(np.abs(out - exact)[rows].max())
    # Probabilities are rounded to bfloat16 before they meet V, and the output is rounded once more.
    allowed = 2 * max(float(np.abs(exact.astype(jnp.bfloat16).astype(np.float32) - exact)[rows].max()), 2**-8)
    expected = np.asarray(FusedPool.of(jax.tree.map(jnp.asarray, exact_pool)).kv, np.float32)
    null_block = LAYER * (len(expected) // NUM_LAYERS)
    missed = [f"error {error:.1e}, allowed {allowed:.1e}"] if not error <= allowed else []
    if not np.array_equal(np.delete(pool, null_block, 0), np.delete(expected, null_block, 0), equal_nan=True):
        missed.append("the pool differs")
    if not np.array_equal(out[rows], again[rows]):
        missed.append("a second run differs")
    if not np.isfinite(out).all():
        missed.append("padding is not finite")
    return {"error": error, "allowed": allowed, "missed": missed}


if __name__ == "__main__":
    sys.exit(main())

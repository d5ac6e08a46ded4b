"""Compare the attention kernels with the float32 reference, or with plain XLA on this machine's GPU or TPU.

`--against reference`: a ragged step of decodes and chunks at the shape of each real model: RoPE, windows, soft caps,
sinks, blocks of 16 and 64, pools of 16 and 8 bits whose unused slots are NaN. `--against xla`: 64 random contexts of up
to 8k, and long chunks, so that each worker has many items and its buffers come round. Exits non-zero if an error is
larger than rounding explains, if the pool or a second run differs in a bit, or if the assembler has known bugs.
--dry-run IMPLEMENTATION interprets a little of it on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device
from lib.workloads import cross_check, pick_kernels, ragged_decodes

from pallas_kernels.paged_attention import NO_WINDOW, FusedPool, PagedAttention
from pallas_kernels.paged_attention.cases import CASES
from tests.pallas_kernels.steps import LAYER, NUM_LAYERS, SCALE, make_step, reference

DECODES = [(1, 1), (16, 1), (17, 1), (64, 1), (65, 1), (300, 1), (1029, 1)]
CHUNKS = [(2, 2), (33, 33), (64, 20), (150, 47), (290, 3), (200, 140), (257, 129)]
WIDTHS = {64: "llama-3.2-1b", 128: "llama-3-8b", 256: "gemma-2-2b-sliding"}
"""A model for each width of a head."""
LONG_CHUNKS = [(300, 300), (5000, 2100), (8192, 8192)]
KV_DTYPES = {"bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float8_e4m3fn}
type Row = dict[str, Any]


def main() -> int:
    """Check, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--against", choices=("reference", "xla"), default="reference")
    args = parser.parse_args()
    facts = describe_device()
    evidence = Evidence(args.json, facts)
    if facts["ptxas_doubt"]:
        evidence.add({"step": "assembler", "missed": [facts["ptxas_doubt"]]})
    for row in (reference_rows if args.against == "reference" else xla_rows)(args.dry_run):
        evidence.add(row)
    return evidence.finish()


def reference_rows(dry_run: str | None) -> Iterator[Row]:
    """Yield a row for every model, small blocks with 16 bits and large ones with 8, and both with both for WIDTHS."""
    names = list(CASES)[:1] if dry_run else list(CASES)
    variants = [(name, *variant) for name in names for variant in ((16, "bfloat16"), (64, "float8_e4m3fn"))]
    variants += [(name, *variant) for name in WIDTHS.values() for variant in ((64, "bfloat16"), (16, "float8_e4m3fn"))]
    for name, block_size, kv in variants[:1] if dry_run else variants:
        try:
            op = pick_kernels(CASES[name], block_size, KV_DTYPES[kv], dry_run)
        except ValueError:
            continue  # a TPU's 8-bit blocks are larger
        chunks = [(1, 1), (35, 1), (20, 18)] if dry_run else DECODES + CHUNKS
        yield {"model": name, "block_size": block_size, "kv": kv} | check(op, name, chunks)


def xla_rows(dry_run: str | None) -> Iterator[Row]:
    """Yield a row for each width of a head, of decodes and of prefills, in pools of 16 and of 8 bits."""
    steps = {"decode": ragged_decodes(64, 8192), "prefill": LONG_CHUNKS}
    if dry_run:
        steps = {"mixed": [*ragged_decodes(2, 40), (150, 140)]}
    for kv, dtype in list(KV_DTYPES.items())[: 1 if dry_run else None]:
        for name in list(WIDTHS.values())[: 1 if dry_run else None]:
            op = pick_kernels(CASES[name], 16 if dry_run else 64, dtype, dry_run)
            for kind, chunks in steps.items():
                yield {"model": name, "kv": kv, "step": kind} | cross_check(op, CASES[name], chunks)


def check(op: PagedAttention, name: str, chunks: list[tuple[int, int]]) -> Row:
    """Run one step twice and compare it with the reference."""
    case, rng = CASES[name], np.random.default_rng(len(chunks))
    step = make_step(rng, chunks, op.shape, query_tile=op.tiles.query, row_alignment=op.row_alignment)
    sinks = rng.standard_normal(op.shape.num_heads).astype(np.float32) if case.has_sinks else None
    window = min(case.window, 100) if case.window else NO_WINDOW  # shorter than the contexts here
    settings = {"window": window, "soft_cap": case.soft_cap, "sinks_n": sinks}
    exact, exact_pool = reference(step, rope=step.rope, **settings)

    @jax.jit
    def function(q: Any, k: Any, v: Any, pool: Any, batch: Any, rope: Any) -> Any:
        return op(q, k, v, pool, batch, rope=rope, layer=LAYER, num_layers=NUM_LAYERS, scale=SCALE, **settings)

    arguments = (step.q, step.k, step.v, FusedPool.of(step.pool), step.batch, step.rope)
    runs = [function(*arguments) for _ in range(2)]
    (out, pool), (again, _) = [(np.asarray(out, np.float32), np.asarray(pool.kv, np.float32)) for out, pool in runs]
    rows = step.rows
    error = float(np.abs(out - exact)[rows].max())
    # Probabilities are rounded to bfloat16 before the matmul by V, and the output is rounded again.
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
    return {"error": round(error, 5), "allowed": round(allowed, 5), "missed": missed}


if __name__ == "__main__":
    sys.exit(main())

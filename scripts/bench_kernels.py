#!/usr/bin/env python3
"""Measure paged attention on the GPU or TPU at hand, beside what the device does at best.

Decode is compared with the bandwidth of a plain copy, prefill with the rate of a large matmul, both measured here. Each
program runs the op many times in a row, so that starting it does not count; times are medians. --dry-run does the same
on a CPU in the kernels' interpreters at toy sizes: it measures nothing, and shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config.resolve import detect_architecture
from pallas_kernels.paged_attention import AttentionBatch, PagedAttention, Rope, pick
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.gpu.write import rotate_and_write

NUM_LAYERS = 2
MODELS = ("llama-3-8b", "llama-3.2-1b", "qwen3-0.6b", "gemma-2-2b-sliding", "smollm2-135m")
DECODES = ((1, 8192), (32, 2048), (64, 2048), (128, 2048), (64, 8192))
"""Pairs of the number of sequences and their context."""
PREFILLS = (4096, 16_384)
WRITES = (1, 64, 256)
"""How many sequences decode in a step."""
KINDS = ("decode", "prefill", "write")
KV_DTYPES = {"bfloat16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--models", nargs="+", choices=CASES, default=MODELS, metavar="MODEL")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dry-run", metavar="IMPLEMENTATION", help="gpu or tpu, interpreted")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    bench = Bench(args.repeats, args.kv, args.block_size, args.dry_run)
    report = describe() | {"peaks": bench.peaks(), "rows": []}
    print(json.dumps(report, indent=1))
    for kind in args.only:
        for model in args.models:
            for row in getattr(bench, kind)(model):
                report["rows"].append(row)
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                if args.json:
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def describe() -> dict[str, Any]:
    """Return the hardware and the versions that figures depend on."""
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device.device_kind,
        "jax": jax.__version__,
        "platform_version": device.client.platform_version.splitlines()[0],
    }


class Bench:
    """Times the op in one configuration."""

    def __init__(self, repeats: int, kv: str, block_size: int, dry_run: str | None) -> None:
        self._repeats = 1 if dry_run else repeats
        self._kv = KV_DTYPES[kv]
        self._block_size = 16 if dry_run else block_size
        self._dry_run = dry_run
        self._copy_bandwidth = self._matmul_rate = 0.0

    def peaks(self) -> dict[str, float]:
        """Measure the best of copying and of multiplying."""
        size = 2**12 if self._dry_run else 2**28
        x = jnp.zeros(size, jnp.float32)
        self._copy_bandwidth = 2 * x.nbytes / self._seconds(jax.jit(lambda x: x + 1), x)
        n = 64 if self._dry_run else 8192
        a = jnp.ones((n, n), jnp.bfloat16)
        self._matmul_rate = 2 * n**3 / self._seconds(jax.jit(lambda a: a @ a), a)
        return {"copy_gb_per_s": self._copy_bandwidth / 1e9, "matmul_tflop_per_s": self._matmul_rate / 1e12}

    def decode(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield the achieved bandwidth: bytes of K and V that must be read, by time."""
        case = CASES[model]
        for num_seqs, context in ((2, 40),) if self._dry_run else DECODES:
            op = self._op(case)
            seconds = self._attention_seconds(op, case, [(context, 1)] * num_seqs)
            seen = min(context, case.window or context)
            num_bytes = num_seqs * seen * case.num_kv_heads * 2 * case.head_dim * jnp.dtype(self._kv).itemsize
            row = {
                "kind": "decode",
                "model": model,
                "seqs": num_seqs,
                "context": context,
                "kv": jnp.dtype(self._kv).name,
            }
            yield row | self._figures(seconds, "gb_per_s", num_bytes / 1e9, self._copy_bandwidth / 1e9)

    def prefill(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield the achieved rate: multiplications that causality and window leave, by time."""
        case = CASES[model]
        for length in (33,) if self._dry_run else PREFILLS:
            op = self._op(case)
            seconds = self._attention_seconds(op, case, [(length, length)])
            window = min(length, case.window or length)
            pairs = window * (window + 1) // 2 + (length - window) * window
            flops = 4 * pairs * case.num_heads * case.head_dim
            row = {"kind": "prefill", "model": model, "tokens": length, "kv": jnp.dtype(self._kv).name}
            yield row | self._figures(seconds, "tflop_per_s", flops / 1e12, self._matmul_rate / 1e12)

    def write(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield the time of rotating q and k and writing k and v, which on a GPU is a kernel of its own."""
        op, case = self._op(CASES[model]), CASES[model]
        if op.implementation != "gpu":
            return
        for num_seqs in (2,) if self._dry_run else WRITES:
            q, k, v, pool, batch = self._arguments(op, case, [(40, 1)] * num_seqs)
            table = jnp.ones((len(q), case.head_dim // 2))
            fixed = {"num_rows": num_seqs, "num_layers": NUM_LAYERS, "interpret": op.interpret}

            def step(pool: Any, call: int, q: Any, *others: Any, fixed: Any = fixed) -> tuple[Any, Any]:
                k, v, slots_t, rope = others
                # All calls have the same q, k and v, so XLA puts them together but once.
                _, pool = rotate_and_write(q, k, v, pool, slots_t, rope, layer=call % NUM_LAYERS, **fixed)
                return pool, q

            rope = Rope(table, table)
            seconds = self._calls_seconds(step, pool, q, k, v, batch.slots_t, rope)
            row = {"kind": "write", "model": model, "seqs": num_seqs, "kv": jnp.dtype(self._kv).name}
            num_bytes = sum(x[:num_seqs].nbytes for x in (q, q, k, v, *rope, k.astype(self._kv), v.astype(self._kv)))
            yield row | self._figures(seconds, "gb_per_s", num_bytes / 1e9, self._copy_bandwidth / 1e9)

    def _figures(self, seconds: float, unit: str, work: float, peak: float) -> dict[str, Any]:
        rate = work / seconds
        return {"us": round(seconds * 1e6, 1), unit: round(rate, 1), "of_peak": round(rate / peak, 3)}

    def _op(self, case: Case) -> PagedAttention:
        platform = {"cuda": "gpu"}.get(jax.default_backend(), jax.default_backend())
        shape = case.shape(self._block_size, jnp.bfloat16, self._kv)
        op, reason = pick(shape, platform, self._dry_run, architecture=detect_architecture(jax.devices()))
        if reason is not None:
            raise SystemExit(f"the kernels of {platform} refuse this shape: {reason}")
        return op

    def _attention_seconds(self, op: PagedAttention, case: Case, chunks: Sequence[tuple[int, int]]) -> float:
        """Time one call of the op."""
        q, k, v, pool, batch = self._arguments(op, case, chunks)
        sinks_n = jnp.zeros(case.num_heads) if case.has_sinks else None
        settings = {"window": case.window or 2**30, "scale": case.head_dim**-0.5, "soft_cap": case.soft_cap}

        def step(pool: Any, call: int, q: Any, k: Any, v: Any, batch: AttentionBatch, sinks_n: Any) -> tuple[Any, Any]:
            layer = {"layer": call % NUM_LAYERS, "num_layers": NUM_LAYERS}
            out, pool = op(q, k, v, pool, batch, sinks_n=sinks_n, **layer, **settings)
            return pool, q + 0 * out  # the next call waits for this one

        return self._calls_seconds(step, pool, q, k, v, batch, sinks_n)

    def _arguments(self, op: PagedAttention, case: Case, chunks: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        """Return q, k, v, pool and batch of (context length, chunk length) sequences."""
        o = op.shape.block_size
        counts = [-(-length // o) for length, _ in chunks]
        num_blocks = 1 + sum(counts)
        ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist()
        blocks = [[ids.pop() for _ in range(count)] for count in counts]
        batch = ragged_batch(chunks, blocks, block_size=o, query_tile=op.tiles.query, row_alignment=op.row_alignment)
        batch = AttentionBatch(*map(jnp.asarray, batch))
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        q, k, v = (
            jax.random.normal(key, (len(batch.slots_t), count, case.head_dim), jnp.bfloat16)
            for key, count in zip(jax.random.split(jax.random.key(0), 3), heads, strict=True)
        )
        pool = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), op.pool_spec(NUM_LAYERS, num_blocks))
        return q, k, v, pool, batch

    def _calls_seconds(self, step: Callable[..., tuple[Any, Any]], pool: Any, first: Any, *others: Any) -> float:
        """Time one `step(pool, call, first, *others)`, which returns the next pool and `first`.

        A program holds several, over the layers in turn.
        """
        calls = 1 if self._dry_run else 16

        @partial(jax.jit, donate_argnums=0)
        def run(pool: Any, first: Any, *others: Any) -> Any:
            for call in range(calls):
                pool, first = step(pool, call, first, *others)
            return pool, first

        state = [pool]

        def once() -> Any:
            state[0], out = run(state[0], first, *others)
            # Of kernels that only write there is nothing else to wait for.
            return out, state[0]

        return self._seconds(once) / calls

    def _seconds(self, function: Callable[..., Any], *args: Any) -> float:
        jax.block_until_ready(function(*args))
        times = []
        for _ in range(self._repeats):
            start = perf_counter()
            jax.block_until_ready(function(*args))
            times.append(perf_counter() - start)
        return float(np.median(times))


if __name__ == "__main__":
    sys.exit(main())

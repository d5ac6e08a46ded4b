"""Measure paged attention on this machine's GPU or TPU, and compare it with the device's peaks.

Decode is compared with the bandwidth of a plain copy, prefill with the rate of a large matmul, both measured here, all
on random data. Times are the device's own, by the profiler, of many calls in one program; the outputs are compared with
plain XLA's. --dry-run IMPLEMENTATION runs toy sizes on a CPU in the kernels' interpreters; its figures mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from lib.device_time import Timing, measure_peaks, time_calls
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device, jax_platform
from lib.workloads import (
    LAYER,
    NUM_LAYERS,
    Chunks,
    Inputs,
    Settings,
    Workload,
    attend,
    compare,
    make_workload,
    pick_kernels,
    pools_are_equal,
    write_kv,
    xla_answer,
)

from pallas_kernels.paged_attention import FusedPool, PagedAttention
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.gpu import handover

MODELS = ("llama-3-8b", "llama-3.2-1b", "gemma-2-2b-sliding")
TOY = "smollm2-135m"
DECODES = ((64, 2048), (1, 8192), (32, 2048), (64, 8192))
"""Pairs of the number of sequences and their context."""
PREFILLS = (4096, 8192, 16_384)
WRITES = (1, 64, 256)
"""How many sequences decode in a step."""
KINDS = ("decode", "prefill", "write")
KV_DTYPES = {"bfloat16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}
L2_BYTES = 60_000_000
"""The largest L2 cache of a Hopper; data that fits into it may be read faster than memory allows."""
type Row = dict[str, Any]
type Step = Callable[[PagedAttention, Settings, Inputs, FusedPool, Array], tuple[Inputs, Array, FusedPool]]


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--models", nargs="+", choices=CASES, default=MODELS, metavar="MODEL")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--kv", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--next", action="store_true", help="the successors of a GPU's kernels, see gpu/handover.py")
    args = parser.parse_args()
    handover.CHOSEN = handover.NEXT if args.next else handover.PROVEN
    evidence = Evidence(args.json, describe_device())
    peaks = measure_peaks(is_dry=bool(args.dry_run))
    evidence.note(peaks=peaks)
    bench = Bench(args.repeats, args.kv, args.block_size, args.dry_run, peaks)
    for kind in args.only:
        for model in [TOY] if args.dry_run else args.models:
            for row in getattr(bench, kind)(model):
                evidence.add({"kind": kind, "model": model, "kv": args.kv} | row)
    return evidence.finish()


class Bench:
    """Times the op in one configuration."""

    def __init__(self, repeats: int, kv: str, block_size: int, dry_run: str | None, peaks: dict[str, float]) -> None:
        self._repeats = 1 if dry_run else repeats
        self._calls = 1 if dry_run else 16
        self._kv = KV_DTYPES[kv]
        self._block_size = 32 if dry_run else block_size
        self._dry_run = dry_run
        self._peaks = peaks

    def decode(self, model: str) -> Iterator[Row]:
        """Yield the achieved bandwidth: bytes of K and V that must be read by time. All sizes share a program."""
        case = CASES[model]
        sizes = ((2, 40), (1, 20)) if self._dry_run else DECODES
        largest = [(max(context for _, context in sizes), 1)] * max(num_seqs for num_seqs, _ in sizes)
        for num_seqs, context in sizes:
            timing, checked = self._attention(case, [(context, 1)] * num_seqs, like=largest)
            seen = min(context, case.window or context)
            num_bytes = num_seqs * seen * case.num_kv_heads * 2 * case.head_dim * jnp.dtype(self._kv).itemsize
            fits = {"fits_l2": num_bytes < L2_BYTES} if jax_platform() == "gpu" else {}
            yield {"seqs": num_seqs, "context": context} | fits | self._bandwidth(timing, num_bytes) | checked

    def prefill(self, model: str) -> Iterator[Row]:
        """Yield the achieved rate: the multiplications that causality and window require, divided by the time."""
        case = CASES[model]
        for length in (33,) if self._dry_run else PREFILLS:
            timing, checked = self._attention(case, [(length, length)])
            window = min(length, case.window or length)
            pairs = window * (window + 1) // 2 + (length - window) * window
            tflop = 4 * pairs * case.num_heads * case.head_dim / 1e12
            rate = figures(timing, "tflop_per_s", tflop, self._peaks["matmul_tflop_per_s"])
            yield {"tokens": length} | rate | checked

    def write(self, model: str) -> Iterator[Row]:
        """Yield the time of rotating q and k and writing k and v, a separate kernel on a GPU."""
        case = CASES[model]
        op = pick_kernels(case, self._block_size, self._kv, self._dry_run)
        for num_seqs in (2,) if self._dry_run else WRITES:
            work = make_workload(op, case, [(40, 1)] * num_seqs)
            _, expected = xla_answer(op, work)
            timing, (_, pool) = self._time(write_once, op, work)
            q, k, v, _, rope, _ = work.inputs
            arrays = (q, q, k, v, *rope, k.astype(self._kv), v.astype(self._kv))
            row = self._bandwidth(timing, sum(x[:num_seqs].nbytes for x in arrays))
            yield {"seqs": num_seqs} | row | {"missed": [] if pools_are_equal(pool, expected) else ["the pool differs"]}

    def _bandwidth(self, timing: Timing, num_bytes: int) -> Row:
        return figures(timing, "gb_per_s", num_bytes / 1e9, self._peaks["copy_gb_per_s"])

    def _attention(self, case: Case, chunks: Chunks, like: Chunks | None = None) -> tuple[Timing, Row]:
        """Time the op, and compare it with plain XLA."""
        op = pick_kernels(case, self._block_size, self._kv, self._dry_run)
        work = make_workload(op, case, chunks, like=like)
        expected = xla_answer(op, work)
        timing, got = self._time(attend_once, op, work)
        return timing, compare(work, got, expected)

    def _time(self, step: Step, op: PagedAttention, work: Workload) -> tuple[Timing, tuple[Array, FusedPool]]:
        """Time a step, and return the last output and pool; the workload's pool is donated."""
        state = [(work.inputs.q_tnh, work.pool)]

        def once() -> tuple[Array, FusedPool]:
            state[0] = repeat(step, op, work.settings, self._calls, work.inputs, state[0][1])
            return state[0]

        timing = time_calls(once, calls=self._calls, repeats=self._repeats)
        return timing, state[0]


def attend_once(op: PagedAttention, settings: Settings, inputs: Inputs, pool: FusedPool, layer: Array) -> Any:
    """Return the next call's inputs, the output and the pool; traced. The next call waits for this one."""
    out_tnh, pool = attend(op, settings, inputs, pool, layer, NUM_LAYERS)
    return inputs._replace(q_tnh=inputs.q_tnh + 0 * out_tnh), out_tnh, pool


def write_once(op: PagedAttention, _: Settings, inputs: Inputs, pool: FusedPool, layer: Array) -> Any:
    """Return the next call's inputs (queries if there is an output) and the pool; traced."""
    return inputs, inputs.q_tnh, write_kv(op, inputs, pool, layer)


@partial(jax.jit, static_argnames=("step", "op", "settings", "calls"), donate_argnames="pool")
def repeat(
    step: Step, op: PagedAttention, settings: Settings, calls: int, inputs: Inputs, pool: FusedPool
) -> tuple[Array, FusedPool]:
    """Run several steps over the layers in turn, the last on LAYER. A step is lowered once."""
    shared = jax.jit(partial(step, op, settings))
    out_tnh = inputs.q_tnh
    for call in reversed(range(calls)):
        inputs, out_tnh, pool = shared(inputs, pool, np.int32((LAYER + call) % NUM_LAYERS))
    return out_tnh, pool


def figures(timing: Timing, unit: str, amount: float, peak: float) -> Row:
    """Return the times of a call, and the rate at which it does an amount of work."""
    rate = amount / timing.seconds
    return {
        "us": round(timing.seconds * 1e6, 1),
        "wall_us": round(timing.wall_seconds * 1e6, 1),
        "clock": timing.clock,
        unit: round(rate, 1),
        "of_peak": round(rate / peak, 3),
        "operations": timing.operations,
    }


if __name__ == "__main__":
    sys.exit(main())

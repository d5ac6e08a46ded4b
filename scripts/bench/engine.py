"""Measure whole engines with dummy weights of real models' shapes: decode steps at several batch sizes and contexts.

Beside each figure stands the floor that memory sets, at the bandwidth of a plain copy measured in the same process: the
parameters that a step reads, the experts that random tokens choose, the KV cache once, and recurrent states twice,
because they are also written. --dry-run interprets the kernels of a GPU or TPU on a CPU, with a toy model.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import jax.numpy as jnp
from lib.device_time import busy_seconds, measure_peaks, microseconds_by_name, profile
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device
from lib.shapes import MODELS, TOY

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.execution import options
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.models.params import array_specs

WARM, TIMED, TRACED = 4, 48, 8
"""Numbers of decode steps."""


class Batch(NamedTuple):
    """Requests that decode together."""

    size: int
    context: int = 128
    top_p: float = 1.0


BATCHES = (Batch(64), Batch(1), Batch(16), Batch(256), Batch(64, 2048), Batch(64, top_p=0.9))
DRY_BATCHES = (Batch(1, 4), Batch(1, 4, 0.9))


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--autotuned", action="store_true", help="on a GPU XLA's own matmuls are tried too, and timed")
    parser.add_argument(
        "--batches",
        nargs="+",
        type=parse_batch,
        default=BATCHES,
        metavar="SIZE[:CONTEXT[:TOP_P]]",
        help="other batches",
    )
    args = parser.parse_args()
    if args.autotuned:
        options.CUBLAS_OPTIONS = {}
    hf = MODELS[args.model] | (TOY if args.dry_run else {})
    batches = DRY_BATCHES if args.dry_run else args.batches
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf))
        fixed: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
        llm = LLM(folder, **fixed, **engine_settings(batches, args.dry_run))
    # Not earlier: the engine first sets how much of a GPU's memory JAX takes.
    evidence = Evidence(args.json, describe_device() | {"model": args.model, "autotuned": args.autotuned})
    peaks = measure_peaks(is_dry=bool(args.dry_run))
    evidence.note(peaks=peaks)
    compiler = llm.llm_engine._core._core._runner.compiler  # type: ignore[attr-defined]
    for batch in batches:
        row = measure(llm, batch, (1, 2, 1) if args.dry_run else (WARM, TIMED, TRACED))
        num_bytes = weight_bytes(compiler, batch.size) + cache_bytes(compiler, batch)
        floor_ms = num_bytes / peaks["copy_gb_per_s"] / 1e6
        evidence.add(row | {"floor_ms": round(floor_ms, 3), "of_floor": round(floor_ms / row["step_ms"], 3)})
    return evidence.finish()


def parse_batch(text: str) -> Batch:
    """Read SIZE, SIZE:CONTEXT or SIZE:CONTEXT:TOP_P."""
    size, *more = text.split(":")
    context, top_p = (*more, *("128", "1")[len(more) :])
    return Batch(int(size), int(context), float(top_p))


def engine_settings(batches: Sequence[Batch], dry_run: str | None) -> dict[str, Any]:
    """Return settings with which only the programs that these batches need are compiled."""
    sizes = sorted({batch.size for batch in batches})
    longest = max(batch.context + most_tokens(batch) for batch in batches)
    settings: dict[str, Any] = {"max_num_seqs": max(sizes), "max_model_len": longest, "enforce_eager": True}
    settings |= {"cudagraph_capture_sizes": sizes, "enable_prefix_caching": False}
    if dry_run:
        settings |= {"attention_config": {"backend": dry_run}, "block_size": 16, "num_gpu_blocks_override": 8}
        settings |= {"max_num_batched_tokens": 16}
    return settings


def measure(llm: LLM, batch: Batch, steps: tuple[int, int, int]) -> dict[str, Any]:
    """Time the decode steps of a batch, after some that compile: by the wall clock, then the device's by the profiler.

    The time of the first prompts includes compiling for them.
    """
    warm, timed, traced = steps
    engine = llm.llm_engine
    temperature = 0.0 if batch.top_p == 1 else 1.0
    ending: dict[str, Any] = {"max_tokens": most_tokens(batch), "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(temperature=temperature, top_p=batch.top_p, **ending)
    names = [f"{batch.size}-{batch.context}-{batch.top_p}-{row}" for row in range(batch.size)]
    start = perf_counter()
    for row, name in enumerate(names):
        ids = [(7 * i + 13 * row) % 100 + 3 for i in range(batch.context)]
        engine.add_request(name, TokensPrompt(prompt_token_ids=ids), sampling)
    decoding: set[str] = set()
    while len(decoding) < batch.size:
        decoding |= {output.request_id for output in engine.step()}
    prompts = perf_counter() - start
    for _ in range(warm):
        engine.step()
    seconds = [timed_step(llm) for _ in range(timed)]
    operations = profile(lambda: [engine.step() for _ in range(traced)])
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    step = sum(seconds) / timed
    return {
        "batch": batch.size,
        "context": batch.context,
        "top_p": batch.top_p,
        "prompts_ms": round(prompts * 1e3, 1),
        "step_ms": round(step * 1e3, 3),
        "median_ms": round(median(seconds) * 1e3, 3),
        "device_ms": round(busy_seconds(operations) / traced * 1e3, 3),
        "tokens_per_s": round(batch.size / step, 1),
        "operations": microseconds_by_name(operations, traced),
    }


def most_tokens(batch: Batch) -> int:
    """Return a length of outputs with which the first request still decodes when the last one's prompt is done."""
    return WARM + TIMED + TRACED + 8 + batch.size * batch.context // 1024


def timed_step(llm: LLM) -> float:
    """Return the seconds of one step of the engine."""
    start = perf_counter()
    llm.llm_engine.step()
    return perf_counter() - start


def weight_bytes(compiler: StepCompiler, num_rows: int) -> float:
    """Return the bytes of the parameters that a step reads: only some rows of an embedding that is no output head."""
    config = compiler.model.config
    moe = next((layer.moe for layer in config.layers if layer.moe), None)
    chosen = 1 - (1 - moe.top_k / moe.num_experts) ** num_rows if moe else 1.0
    total = 0.0
    for path, spec in array_specs(compiler.model.specs.param_specs()).items():
        size = math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize
        total += size * (chosen if spec.num_experts else 1.0) * (path != "embed.table" or config.tie_word_embeddings)
    return total


def cache_bytes(compiler: StepCompiler, batch: Batch) -> float:
    """Return the bytes that a step moves of attention's cache and of recurrent states."""
    layout = compiler.config.kv_layout
    tokens = batch.size * (batch.context + TIMED / 2)
    kv = sum(group.block_bytes for group in layout.groups) / layout.block_size
    return tokens * kv + 2 * batch.size * sum(group.slot_bytes for group in layout.states)


if __name__ == "__main__":
    sys.exit(main())

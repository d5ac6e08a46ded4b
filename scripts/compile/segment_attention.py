"""Compile attention within segments for the shapes of vision towers, and check what it holds in memory.

Checked: scores exist for a tile of queries and a tile of keys only, and all scratch stays within 256 MiB besides the
copies of queries, keys, values and outputs by head.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from compile.program import Row, compile_program, report, run, without
from compile.target import Target
from pallas_kernels.segment_attention import SegmentAttention

CASES = {"qwen3-vl": (16, 72), "qwen2.5-vl": (16, 80), "pixtral": (16, 64)}
"""Heads and their size; SigLIP's, in Gemma 3, are those of Qwen3-VL."""
SLOTS = (1024, 4096, 65_536)
"""Patches: those of a picture of 448 x 448 pixels, of one of 896 x 896, and the most of Qwen3-VL."""
LANES = 128
SCRATCH = 256 * 2**20
LEGEND = """
heads_MiB is one array of heads, with a TPU's padding to 128 lanes; temp_MiB is all scratch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--slots", nargs="+", type=int, default=list(SLOTS), metavar="N")


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    return report(rows, without(rows, "seconds", "missed"), LEGEND, args.json, target)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    for case, num_slots in itertools.product(args.cases, args.slots):
        yield {"case": case, "slots": num_slots}, partial(compile_one, *CASES[case], num_slots, target)


def compile_one(num_heads: int, head_dim: int, num_slots: int, target: Target) -> Row:
    """Compile attention of one tower's layer in bfloat16 and return its row."""
    heads = jax.ShapeDtypeStruct((num_slots, num_heads, head_dim), jnp.bfloat16)
    bounds = jax.ShapeDtypeStruct((num_slots,), jnp.int32)
    op = partial(SegmentAttention(), scale=head_dim**-0.5)
    program = compile_program(op, (heads, heads, heads, bounds, bounds), target)
    width = head_dim if target.is_gpu else -(-head_dim // LANES) * LANES
    heads_bytes = num_slots * num_heads * width * 2
    temp = program.memory.temp_size_in_bytes
    missed = [f"scratch of {temp >> 20} MiB"] if temp > SCRATCH + 4 * heads_bytes else []
    figures = {"heads_MiB": round(heads_bytes / 2**20, 1), "temp_MiB": program.temp_mib}
    return figures | {"seconds": program.seconds, "missed": missed}

"""Compile attention within segments for the shapes of vision towers, and check what it takes.

Checked: scores exist for a tile of queries and a tile of keys only, and all scratch stays within 256 MiB besides the
copies of queries, keys, values and outputs by head; on a GPU the host is asked nothing, and no kernel spills a
register or lacks shared memory. A GPU's rows have plain XLA's, of counted loops, too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from compile.compiled_step import find_host_predicates
from compile.gpu_compiler import read_ptxas
from compile.program import Row, compile_program, kernel_figures, ptxas_misses, report, run, without
from compile.target import Target
from pallas_kernels.segment_attention import SegmentShape, pick

CASES = {"qwen3-vl": (16, 72), "qwen2.5-vl": (16, 80), "pixtral": (16, 64)}
"""Heads and their size; SigLIP's, in Gemma 3, are those of Qwen3-VL."""
SLOTS = (1024, 4096, 65_536)
"""Patches: those of a picture of 448 x 448 pixels, of one of 896 x 896, and the most of Qwen3-VL."""
KERNEL = "segment_attention"
"""The name of a GPU's own kernel."""
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
        shape = SegmentShape(*CASES[case], jnp.dtype("bfloat16"))
        for name in ("gpu", "xla_counted") if target.is_gpu else ("tpu",):
            yield {"case": case, "slots": num_slots, "by": name}, partial(compile_one, name, shape, num_slots, target)


def compile_one(name: str, shape: SegmentShape, num_slots: int, target: Target) -> Row:
    """Compile attention of one tower's layer in bfloat16 and return its row.

    Raises ValueError if the implementation does not take the shape.
    """
    op, _ = pick([shape], target.hardware.platform, name, architecture=target.architecture)
    num_heads, head_dim, dtype = shape
    heads = jax.ShapeDtypeStruct((num_slots, num_heads, head_dim), dtype)
    bounds = jax.ShapeDtypeStruct((num_slots,), jnp.int32)
    attend = partial(op, scale=head_dim**-0.5)
    program = compile_program(attend, (heads, heads, heads, bounds, bounds), target, as_engine=True)
    width = head_dim if target.is_gpu else -(-head_dim // LANES) * LANES
    heads_bytes = num_slots * num_heads * width * 2
    temp = program.memory.temp_size_in_bytes
    missed = [f"scratch of {temp >> 20} MiB"] if temp > SCRATCH + 4 * heads_bytes else []
    figures: Row = {"heads_MiB": round(heads_bytes / 2**20, 1), "temp_MiB": program.temp_mib}
    if target.is_gpu:
        kernels = read_ptxas(program.messages)
        missed += ptxas_misses(program)
        if not kernels or (name == "gpu" and KERNEL not in kernels):
            missed.append(f"ptxas said nothing of {KERNEL if name == 'gpu' else 'any kernel'}")
        if asked := find_host_predicates("\n".join(program.thunks), program.hlo):
            missed.append(f"the host is asked: {asked}")
        figures["kernels"] = kernel_figures(program)
    return figures | {"seconds": program.seconds, "missed": missed}

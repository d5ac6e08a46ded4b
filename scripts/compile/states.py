"""Compile ops of recurrent state, and check them.

Checked, for a decode step and a prefill of each model's shape, in a loop over layers: the pool is updated in place, no
operation makes a second one, and the scratch beside it is small; on an H100 no register is spilled and shared memory
suffices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compile.gpu_cost import LIMITS
from compile.program import Row, compile_program, kernel_figures, pool_misses, ptxas_misses, report, run, without
from compile.target import Target
from compile.tpu_listing import read_loops
from pallas_kernels.recurrent_state import StateBatch, gated_delta, state_space
from pallas_kernels.recurrent_state.gated_delta.cases import CASES as GATED_DELTA_CASES
from pallas_kernels.recurrent_state.state_space.cases import CASES as STATE_SPACE_CASES

STEPS = {"decode": (64, 64), "prefill": (2048, 64), "long-prefill": (8192, 256)}
"""Steps by name: their numbers of tokens and sequences."""
LONG_CASE = "qwen3.5-27b"
"""The only case that the last step is compiled for."""
NUM_LAYERS, NUM_SLOTS = 4, 129
TEMP_LIMIT, GPU_TEMP_LIMIT, PLAIN_TEMP_LIMIT = 160 * 2**20, 288 * 2**20, 320 * 2**20
"""Values of a layer and of the next, of 2,048 tokens and 64 heads of 128 numbers 32 MiB each, and inputs and outputs of
some tiles; on a GPU of all of them, with what one kernel leaves to the next. Plain XLA copies the states of 32 decodes
too, twice."""
KERNELS = ("decode", "tiles")
LEGEND = f"""
KiB is what a thread block of a GPU's kernel brings for a tile, with the state that few tiles need, and ns what each
takes at one SM's share of {LIMITS}.
The L2 cache serves a part of it. Neither latencies nor other instructions count. Kernels stand where first needed.
bundles: of a TPU's kernel for one decode, all heads, or for one tile of tokens, all heads; one bundle a cycle.
left_out: the loops whose number of trips is not known, which the bundles lack.
state_ns: what it takes to read and to write a sequence's state at the memory's nominal bandwidth."""


class Op(NamedTuple):
    """An op with its cases and the shapes of its inputs."""

    module: Any
    cases: dict[str, Any]


OPS = {
    "gated_delta": Op(gated_delta, dict(GATED_DELTA_CASES)),
    "state_space": Op(state_space, dict(STATE_SPACE_CASES)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS, metavar="OP")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of pallas_kernels/*/cases.py (default: all)")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    parser.add_argument("--implementation", help="instead of the platform's own kernels, or plain XLA without one")


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    return report(rows, sheet_rows(rows), LEGEND, args.json, target)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    for op, case, step in selection(args.ops, args.cases, args.steps):
        compile_one = partial(compile_step, op, case, step, target, args.implementation)
        yield {"op": op, "case": case, "step": step}, compile_one


def selection(ops: list[str], cases: list[str] | None, steps: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield op, case and step, each shape once."""
    for op in ops:
        seen = set()
        for case in OPS[op].cases:
            shape = OPS[op].cases[case].shape()
            if case not in cases if cases else case.startswith("tiny") or shape in seen:
                continue
            seen.add(shape)
            yield from ((op, case, step) for step in steps if step != "long-prefill" or case == LONG_CASE)


def compile_step(name: str, case: str, step: str, target: Target, implementation: str | None) -> Row:
    """Compile a step and return its row."""
    module, shape = OPS[name].module, OPS[name].cases[case].shape()
    op, _ = module.pick(shape, target.hardware.platform, implementation, architecture=target.architecture)
    pool, inputs = op.pool_spec(NUM_LAYERS, NUM_SLOTS), abstract_inputs(shape, STEPS[step][0])
    batch = StateBatch(*(jax.ShapeDtypeStruct((STEPS[step][1],) * (i != 2), jnp.int32) for i in range(7)))  # pyright: ignore[reportArgumentType]
    program = compile_program(of_layers(op), (inputs, pool, batch), target, donated=1, as_engine=True)
    missed = pool_misses(program, pool, makers="copy(?:-start)?") + ptxas_misses(program)
    # A long step has larger inputs and outputs.
    own_limit = GPU_TEMP_LIMIT if target.is_gpu else TEMP_LIMIT
    limit = (PLAIN_TEMP_LIMIT if op.implementation == "xla" else own_limit) * max(1, STEPS[step][0] // 2048)
    if program.memory.temp_size_in_bytes > limit:
        missed.append("scratch")
    figures = {"runs": op.implementation, "alias_MiB": program.alias_mib, "temp_MiB": program.temp_mib}
    if not target.is_gpu:
        figures |= tpu_figures(name, pool, target)
    elif kernels := kernel_figures(program):
        figures |= {"kernels": kernels}
    return figures | {"seconds": program.seconds, "missed": missed}


def abstract_inputs(shape: Any, t: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return shapes of an op's inputs."""
    if isinstance(shape, gated_delta.GatedDeltaShape):
        keys, values = (shape.num_key_heads, shape.key_dim), (shape.num_value_heads, shape.value_dim)
        sizes: list[Any] = [(t, *keys), (t, *keys), (t, *values)]
        sizes += [(t, shape.num_value_heads, shape.decay_dim), (t, shape.num_value_heads)]
        of_model = (0, 1, 2)
    else:
        heads, groups = shape.num_heads, (t, shape.num_groups, shape.state_dim)
        sizes = [(t, heads, shape.head_dim), (t, heads), (heads,), groups, groups, (heads,)]
        of_model = (0, 3, 4)
    dtypes = (shape.dtype if i in of_model else jnp.float32 for i in range(len(sizes)))
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True))


def of_layers(op: Any) -> Any:
    """Return the op as a model runs it: in a loop over layers, each on the output of the one before."""
    position = 2 if isinstance(op.shape, gated_delta.GatedDeltaShape) else 0

    def run(inputs: Any, pool: Any, batch: Any) -> Any:
        def body(layer: Any, carry: Any) -> Any:
            values, pool = carry
            layer_inputs = [*inputs[:position], values, *inputs[position + 1 :]]
            return op(*layer_inputs, pool, batch, layer=layer, num_layers=NUM_LAYERS)

        return jax.lax.fori_loop(0, NUM_LAYERS, body, (inputs[position], pool))

    return run


def sheet_rows(rows: list[Row]) -> list[Row]:
    """Return the cost sheet's rows: for a GPU one per kernel, without columns that are no cost."""
    sheet = []
    for row in rows:
        [shown] = without([row], "seconds", "missed", "kernels")
        kernels = row.get("kernels", {})
        sheet += [shown | {"kernel": name} | figures for name, figures in kernels.items()] or [shown]
    return sheet


def tpu_figures(name: str, pool: jax.ShapeDtypeStruct, target: Target) -> Row:
    """Return the bundles of one program of each kernel's grid, and the time of a state's bytes."""
    figures: Row = {}
    for kernel in KERNELS:
        if any(target.dump.glob(f"*{name}_{kernel}*final_bundles.txt")):
            loop = max(read_loops(target.dump, f"{name}_{kernel}").inside, key=lambda loop: loop.bundles_of_one_trip)
            figures |= {f"{kernel}_bundles": loop.bundles_of_one_trip, f"{kernel}_left_out": loop.num_unknown}
    state_bytes = pool.size // pool.shape[0] * pool.dtype.itemsize
    return figures | {"state_ns": round(2e9 * state_bytes / target.bandwidth)}

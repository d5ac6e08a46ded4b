"""Compile ops of recurrent state for a TPU or an H100 that is not there, with its real compiler, and check them.

Needs what scripts/compile.py tpu_kernels or scripts/compile.py gpu_kernels needs, and no device. Checked, for a decode
step and a prefill of each model's shape, in a loop over layers: the pool is updated in place, no operation makes a
second one, and the scratch beside it is small; on an H100 no register is spilled and shared memory suffices. These are
static figures; nothing runs.
"""

# ruff: noqa: E402  the compilers read the environment when they are loaded

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE, find_topology

DUMP = Path(tempfile.mkdtemp(prefix="states-"))
IS_GPU = "h100" in sys.argv
os.environ |= compiler_environment(HARDWARE["h100" if IS_GPU else "v6e"], dict(os.environ))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lib.sheet import print_sheet, write_rows

from compile import ptx
from compile.gpu_compiler import FIRST_PTXAS, SMEM_LIMIT, captured_output, noted_smem, ptxas_version, read_ptxas
from compile.gpu_compiler import find_device as find_gpu
from compile.gpu_cost import LIMITS, cost, occupancy
from compile.tpu_compiler import BANDWIDTH
from compile.tpu_compiler import find_device as find_tpu
from compile.tpu_listing import clear, read_loops
from jaxllm.execution.options import compiler_options
from pallas_kernels.recurrent_state import StateBatch, gated_delta, state_space
from pallas_kernels.recurrent_state.gated_delta.cases import CASES as GATED_DELTA_CASES
from pallas_kernels.recurrent_state.state_space.cases import CASES as STATE_SPACE_CASES

STEPS = {"decode": (64, 64), "prefill": (2048, 64), "long-prefill": (8192, 256)}
"""Steps by name: how many tokens and sequences they have."""
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
state_ns: what it takes to read and to write a sequence's state at the memory's nominal bandwidth."""


class Op(NamedTuple):
    """An op with its cases and the shapes of its inputs."""

    module: Any
    cases: dict[str, Any]


OPS = {
    "gated_delta": Op(gated_delta, dict(GATED_DELTA_CASES)),
    "state_space": Op(state_space, dict(STATE_SPACE_CASES)),
}


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100", help="h100, v5e:1x1, v6e:1x1 or tpu7x:1x1x1 (default: %(default)s)")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS, metavar="OP")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of pallas_kernels/*/cases.py (default: all)")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS, metavar="STEP")
    parser.add_argument("--implementation", help="instead of the platform's own kernels, or plain XLA without one")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    head: dict[str, Any] = {"jax": jax.__version__, "target": args.target}
    if IS_GPU:
        head["ptxas"] = ".".join(map(str, ptxas_version()))
    sharding = find_gpu() if IS_GPU else find_tpu(args.target)
    rows = []
    try:
        for op, case, step in selection(args.ops, args.cases, args.steps):
            row = {"op": op, "case": case, "step": step}
            row |= compile_step(op, case, step, args.target, sharding, args.implementation)
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    finally:
        shutil.rmtree(DUMP)
    if args.json:
        write_rows(args.json, head, rows)
    print("\nCost sheet")
    print_sheet(sheet_rows(rows))
    print(LEGEND)
    missed = [row for row in rows if row["missed"]]
    print(f"{len(rows)} compiled, {len(missed)} missed")
    return int(bool(missed) or (IS_GPU and ptxas_version() < FIRST_PTXAS))


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


def compile_step(
    name: str, case: str, step: str, target: str, sharding: NamedSharding, implementation: str | None
) -> dict[str, Any]:
    """Return what the compilers say of a step, and what it misses of what is wanted."""
    module, shape = OPS[name].module, OPS[name].cases[case].shape()
    platform, architecture = ("gpu", "9.0") if IS_GPU else ("tpu", find_topology(target)[0].device_kind)
    op, _ = module.pick(shape, platform, implementation, architecture=architecture)
    pool, inputs = op.pool_spec(NUM_LAYERS, NUM_SLOTS), abstract_inputs(shape, STEPS[step][0])
    batch = StateBatch(*(jax.ShapeDtypeStruct((STEPS[step][1],) * (i != 2), jnp.int32) for i in range(7)))  # pyright: ignore[reportArgumentType]
    clear(DUMP)
    started = time.monotonic()
    with noted_smem() as smem, captured_output() as output:
        try:
            jitted = jax.jit(of_layers(op), donate_argnums=1, in_shardings=sharding, out_shardings=sharding)
            with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
                lowered = jitted.trace(inputs, pool, batch).lower(lowering_platforms=("cuda" if IS_GPU else "tpu",))
            options = compiler_options("gpu", jnp.bfloat16, batch_invariant=False) if IS_GPU else None
            compiled = lowered.compile(options)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return {"missed": [f"{type(error).__name__}: {str(error)[:1000]}"]}
    memory: Any = compiled.memory_analysis()
    missed = []
    if memory.alias_size_in_bytes < pool.size * pool.dtype.itemsize:
        missed.append("the pool is copied")
    dims = ",".join(map(str, pool.shape))
    if made := re.findall(rf"= \w+\[{dims}\]\S* copy(?:-start)?\(", compiled.as_text() or ""):
        missed.append(f"an operation makes a pool: {made[:2]}")
    # A long step has as much more of inputs and outputs.
    own_limit = GPU_TEMP_LIMIT if IS_GPU else TEMP_LIMIT
    limit = (PLAIN_TEMP_LIMIT if op.implementation == "xla" else own_limit) * max(1, STEPS[step][0] // 2048)
    if memory.temp_size_in_bytes > limit:
        missed.append("scratch")
    figures, wrong = gpu_figures(smem, output[0]) if IS_GPU else (tpu_figures(name, pool, target), [])
    return {
        "runs": op.implementation,
        "alias_MiB": round(memory.alias_size_in_bytes / 2**20, 1),
        "temp_MiB": round(memory.temp_size_in_bytes / 2**20, 2),
        **figures,
        "seconds": round(time.monotonic() - started, 1),
        "missed": missed + wrong,
    }


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
    """Return the op as a model runs it: in a loop over layers, each on values that the one before read."""
    position = 2 if isinstance(op.shape, gated_delta.GatedDeltaShape) else 0

    def run(inputs: Any, pool: Any, batch: Any) -> Any:
        def body(layer: Any, carry: Any) -> Any:
            values, pool = carry
            own = [*inputs[:position], values, *inputs[position + 1 :]]
            return op(*own, pool, batch, layer=layer, num_layers=NUM_LAYERS)

        return jax.lax.fori_loop(0, NUM_LAYERS, body, (inputs[position], pool))

    return run


def gpu_figures(smem: dict[str, int], output: str) -> tuple[dict[str, Any], list[str]]:
    """Return what ptxas says of the kernels of a step, and what is wrong with them."""
    kernels = read_ptxas(output)
    wrong = [f"{name} spills {spilled} bytes" for name, (_, spilled) in kernels.items() if spilled]
    if smem and max(smem.values()) > SMEM_LIMIT:
        wrong.append("shared memory")
    found: dict[str, Any] = {}
    for name, kernel in ptx.read_kernels(output).items():
        found[name] = occupancy(kernels[name][0], kernel.threads, smem.get(name, 0))
        if not name.endswith("_decode"):
            found[name] |= cost(name, kernel)
    return ({"kernels": found} if found else {}), wrong


def sheet_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cost sheet's rows, of a GPU one for each kernel, without what is no cost."""
    sheet = []
    for row in rows:
        shown = {key: value for key, value in row.items() if key not in ("seconds", "missed", "kernels")}
        kernels = row.get("kernels", {})
        sheet += [shown | {"kernel": name} | figures for name, figures in kernels.items()] or [shown]
    return sheet


def tpu_figures(name: str, pool: jax.ShapeDtypeStruct, target: str) -> dict[str, Any]:
    """Return the bundles of a program of the grid of a step's kernels, and the time that a state's bytes take."""
    figures: dict[str, Any] = {}
    for kernel in KERNELS:
        if any(DUMP.glob(f"*{name}_{kernel}*final_bundles.txt")):
            loops = read_loops(DUMP, f"{name}_{kernel}").inside
            figures[f"{kernel}_bundles"] = max(loop.bundles_of_one_trip for loop in loops)
    state_bytes = pool.size // pool.shape[0] * pool.dtype.itemsize
    return figures | {"state_ns": round(2e9 * state_bytes / BANDWIDTH[target.partition(":")[0]])}


if __name__ == "__main__":
    sys.exit(main())

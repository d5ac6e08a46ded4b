"""Compile a GPU's decodes of recurrent state for an H100 that is not there, with the real ptxas, and check them.

Needs what scripts/compile.py gpu_kernels needs, and no GPU. Checked, for some layers of each model in a step of decodes
alone: no register is spilled, shared memory suffices, the pool is updated in place, without a copy, and the step is one
command buffer. The cost sheet at the end says what a thread block moves and executes, at the limits of one SM. These
are static figures; nothing runs. scripts/compile.py states compiles steps with longer chunks.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE

os.environ |= compiler_environment(HARDWARE["h100"], dict(os.environ))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from lib.sheet import print_sheet, write_rows

from compile import ptx
from compile.gpu_compiler import (
    FIRST_PTXAS,
    SMEM_LIMIT,
    captured_output,
    find_device,
    noted_smem,
    ptxas_version,
    read_ptxas,
)
from compile.gpu_cost import CLOCK, H100, NUM_SMS, occupancy
from jaxllm.execution.options import compiler_options
from pallas_kernels.recurrent_state import StateBatch, causal_conv, gated_delta, state_space
from pallas_kernels.recurrent_state.causal_conv.cases import CASES as CONV_CASES
from pallas_kernels.recurrent_state.causal_conv.gpu import thread_block_channels
from pallas_kernels.recurrent_state.gated_delta.cases import CASES as DELTA_CASES
from pallas_kernels.recurrent_state.gpu import PART
from pallas_kernels.recurrent_state.state_space.cases import CASES as SPACE_CASES

NUM_LAYERS, NUM_SLOTS, SEQS = 6, 128, 64  # fewer layers would be too few launches for a command buffer
TEMP_LIMIT = 2**20
"""The most bytes of scratch of a step, besides room for each layer's inputs: an op may put them side by side."""
SCHEDULERS = 4
GRAPHS_JAX = (0, 12)
"""Older versions of jax put no Mosaic GPU kernel into a CUDA graph."""
LEGEND = f"""
KiB is what a thread block reads, and it writes as much; in_flight_KiB is what those on an SM read at a time. HBM_ns is
what both take at one SM's share of {H100.bytes_per_second / 1e12:.2f} TB/s, issue_ns what all of the kernel's PTX
instructions take at {SCHEDULERS} a cycle of {CLOCK / 1e9:.2f} GHz. Neither latencies count nor what comes from the L2
cache, such as weights. Each kernel is compiled once, and stands where it is first needed.
"""


class Layer(NamedTuple):
    """A layer's op, the specs of its inputs, and the kernel that it should run in."""

    op: Any
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    settings: Mapping[str, Any]
    kernel: str
    block_bytes: int
    """The bytes of states that a thread block reads; of a convolution, with those of the token's inputs."""


def main() -> int:
    """Compile and check all layers, print and write what is found, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], metavar="DTYPE", help="of the inputs")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    version, sharding = ptxas_version(), find_device()
    rows, seen, wanted = [], set(), set()
    for dtype in args.dtypes:
        for name, layer in layers(jnp.dtype(dtype)):
            row = {"case": name, "kernel": layer.kernel, "dtype": dtype} | compile_layer(layer, sharding)
            rows.append(row)
            wanted.add(layer.kernel)
            seen |= {layer.kernel} if "registers" in row else set()
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.json:
        write_rows(args.json, {"jax": jax.__version__, "ptxas": ".".join(map(str, version)), "target": "h100"}, rows)
    print("\nCost sheet")
    hidden = ("temp_MiB", "launches", "seconds", "missed")
    print_sheet([{key: row[key] for key in row if key not in hidden} for row in rows if "registers" in row])
    print(LEGEND)
    missed = [row for row in rows if row["missed"]]
    print(f"{len(rows)} compiled by ptxas {version[0]}.{version[1]}, {len(missed)} missed")
    if wanted - seen:
        print(f"ptxas said nothing of {', '.join(sorted(wanted - seen))}")
    return int(bool(missed or wanted - seen) or version < FIRST_PTXAS)


def layers(dtype: Any) -> Iterator[tuple[str, Layer]]:
    """Yield the layers of real models by name, for inputs of a dtype."""
    f32 = jnp.float32
    for name, case in real(DELTA_CASES):
        shape = case.shape(dtype)
        op, _ = gated_delta.pick(shape, "gpu", architecture="9.0")
        keys, heads = spec(dtype, SEQS, shape.num_key_heads, shape.key_dim), shape.num_value_heads
        inputs = keys, keys, spec(dtype, SEQS, heads, shape.value_dim)
        gates = spec(f32, SEQS, heads, shape.decay_dim), spec(f32, SEQS, heads)
        yield name, Layer(op, (*inputs, *gates), {}, "gated_delta_decode", PART * shape.key_dim * 4)
    for name, case in real(SPACE_CASES):
        shape = case.shape(dtype)
        op, _ = state_space.pick(shape, "gpu", architecture="9.0")
        x, of_heads = spec(dtype, SEQS, shape.num_heads, shape.head_dim), spec(f32, shape.num_heads)
        written = spec(dtype, SEQS, shape.num_groups, shape.state_dim)
        inputs = x, spec(f32, SEQS, shape.num_heads), of_heads, written, written, of_heads
        yield name, Layer(op, inputs, {}, "state_space_decode", PART * shape.state_dim * 4)
    for name, case in real(CONV_CASES):
        shape = case.shape(dtype)
        op, _ = causal_conv.pick(shape, "gpu", architecture="9.0")
        inputs = spec(dtype, SEQS, shape.num_channels), spec(dtype, shape.kernel_size, shape.num_channels)
        settings: dict[str, Any] = {"activation": case.activation}
        if case.has_bias:
            settings["bias_c"] = jnp.zeros(shape.num_channels, dtype)
        block_bytes = shape.kernel_size * thread_block_channels(shape.num_channels, dtype) * dtype.itemsize
        yield name, Layer(op, inputs, settings, "causal_conv_decode", block_bytes)


def real[Case](cases: Mapping[str, Case]) -> list[tuple[str, Case]]:
    """Return the cases that are no made-up small ones."""
    return [(name, case) for name, case in cases.items() if not name.startswith("tiny")]


def spec(dtype: Any, *shape: int) -> Any:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_layer(layer: Layer, sharding: NamedSharding) -> dict[str, Any]:
    """Return what the compilers say of a step of `NUM_LAYERS` such layers, and under `missed` what is wrong with it."""
    if layer.op.implementation != "gpu":
        return {"missed": [f"it runs in {layer.op.implementation}"]}
    pool, ints = layer.op.pool_spec(NUM_LAYERS, NUM_SLOTS), spec(jnp.int32, SEQS)
    batch = StateBatch(ints, ints, spec(jnp.int32), ints, ints, None, ints)

    def function(pool: Any, inputs: Any, batch: Any) -> Any:
        outs = []
        for number in range(NUM_LAYERS):
            out, pool = layer.op(*inputs, pool, batch, layer=number, num_layers=NUM_LAYERS, **layer.settings)
            outs.append(out)
        return outs, pool

    jitted = jax.jit(function, donate_argnums=0, in_shardings=sharding, out_shardings=sharding)
    started = time.monotonic()
    with noted_smem() as smem, captured_output() as output, tempfile.TemporaryDirectory() as dump:
        try:
            with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
                lowered = jitted.trace(pool, layer.inputs, batch).lower(lowering_platforms=("cuda",))
            options = compiler_options("gpu", jnp.bfloat16, batch_invariant=False)
            compiled = lowered.compile(options | {"xla_dump_to": dump})
            thunks = "".join(x.read_text() for x in Path(dump).glob("*.thunk_sequence_after_thunk_passes.txt"))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            return {"missed": [f"{type(error).__name__}: {str(error)[:300]}"]}
    memory: Any = compiled.memory_analysis()
    return {
        **read_kernel(layer, output[0], smem[layer.kernel]),
        "temp_MiB": round(memory.temp_size_in_bytes / 2**20, 2),
        "launches": sum("kCommandBuffer" not in line for line in thunks.splitlines() if ": k" in line),
        "seconds": round(time.monotonic() - started, 1),
        "missed": misses(layer, pool, output[0], smem[layer.kernel], memory, compiled.as_text() or "", thunks),
    }


def read_kernel(layer: Layer, text: str, smem: int) -> dict[str, Any]:
    """Return the row of the cost sheet, by the compilers' output; nothing for a kernel that was compiled before."""
    if layer.kernel not in (found := ptx.read_kernels(text)):
        return {}
    registers, _ = read_ptxas(text)[layer.kernel]
    threads = found[layer.kernel].threads
    held = occupancy(registers, threads, smem)
    body = text.split(f".visible .entry {layer.kernel}")[1].partition("\n}")[0]
    instructions = len(re.findall(r"^\s+(?:@\S+\s+)?[a-z][\w.:]*\s+[^;]*;", body, re.MULTILINE))
    kib = layer.block_bytes / 1024
    return held | {
        "KiB": round(kib, 1),
        "in_flight_KiB": round(kib * held["blocks_per_SM"]),
        "HBM_ns": round(1e9 * 2 * layer.block_bytes / (H100.bytes_per_second / NUM_SMS)),
        "instructions": instructions,
        "issue_ns": round(1e9 * instructions * threads / 32 / SCHEDULERS / CLOCK),
    }


def misses(layer: Layer, pool: Any, text: str, smem: int, memory: Any, hlo: str, thunks: str) -> list[str]:
    """Return what is wrong with a compiled step, by what ptxas printed, the final HLO and XLA's list of thunks."""
    pool_bytes = pool.size * pool.dtype.itemsize
    own_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in layer.inputs)
    top = [line for line in thunks.splitlines() if line and not line.startswith(" ")]
    is_graph = len(top) == 1 and "kCommandBuffer" in top[0]
    dims = ",".join(map(str, pool.shape))
    wrong = {
        "spills": any(spilled for _, spilled in read_ptxas(text).values()),
        "shared memory": smem > SMEM_LIMIT,
        "the pool is copied": memory.alias_size_in_bytes < pool_bytes,
        "an operation makes a pool": re.search(rf"= \w+\[{dims}\]\S* (copy|fusion|dynamic-|while)", hlo),
        "scratch": memory.temp_size_in_bytes > TEMP_LIMIT + NUM_LAYERS * own_bytes,
        f"not one command buffer but {len(top)} thunks": not is_graph and jax.__version_info__ >= GRAPHS_JAX,
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


if __name__ == "__main__":
    sys.exit(main())

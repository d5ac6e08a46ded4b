"""Compile a GPU's decodes of recurrent state, and check them.

Checked, for some layers of each model in a step of decodes alone: no register is spilled, shared memory suffices, the
pool is updated in place, without a copy, and the step is one command buffer. The cost sheet at the end has what a
thread block moves and executes, at the limits of one SM. `states` compiles steps with longer chunks.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compile import ptx
from compile.gpu_compiler import read_ptxas
from compile.gpu_cost import CLOCK, H100, NUM_SMS, occupancy
from compile.program import (
    Program,
    Row,
    compile_program,
    graph_misses,
    pool_misses,
    ptxas_misses,
    report,
    run,
    without,
)
from compile.target import Target
from pallas_kernels.recurrent_state import StateBatch, causal_conv, gated_delta, state_space
from pallas_kernels.recurrent_state.causal_conv.cases import CASES as CONV_CASES
from pallas_kernels.recurrent_state.causal_conv.gpu import thread_block_channels
from pallas_kernels.recurrent_state.gated_delta.cases import CASES as DELTA_CASES
from pallas_kernels.recurrent_state.gpu import PART
from pallas_kernels.recurrent_state.state_space.cases import CASES as SPACE_CASES

NUM_LAYERS, NUM_SLOTS, SEQS = 6, 128, 64  # fewer layers would be too few launches for a command buffer
TEMP_LIMIT = 2**20
"""The most bytes of scratch of a step besides each layer's inputs, which an op may put side by side."""
SCHEDULERS = 4
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
    """The bytes of states that a thread block reads; a convolution's include the token's inputs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], metavar="DTYPE", help="of the inputs")


def main(args: argparse.Namespace, target: Target) -> int:
    rows = run(jobs(args, target))
    unseen = {row["kernel"] for row in rows} - {row["kernel"] for row in rows if "registers" in row}
    sheet = without((row for row in rows if "registers" in row), "temp_MiB", "launches", "seconds", "missed")
    return report(rows, sheet, LEGEND, args.json, target, *unseen)


def jobs(args: argparse.Namespace, target: Target) -> Iterator[tuple[Row, Callable[[], Row]]]:
    for dtype in args.dtypes:
        for name, layer in layers(jnp.dtype(dtype), target):
            yield {"case": name, "kernel": layer.kernel, "dtype": dtype}, partial(compile_layer, layer, target)


def layers(dtype: Any, target: Target) -> Iterator[tuple[str, Layer]]:
    """Yield the layers of real models by name, for inputs of a dtype on a target."""
    f32 = jnp.float32
    for name, case in real(DELTA_CASES):
        shape = case.shape(dtype)
        op, _ = gated_delta.pick(shape, "gpu", architecture=target.architecture)
        keys, heads = spec(dtype, SEQS, shape.num_key_heads, shape.key_dim), shape.num_value_heads
        inputs = keys, keys, spec(dtype, SEQS, heads, shape.value_dim)
        gates = spec(f32, SEQS, heads, shape.decay_dim), spec(f32, SEQS, heads)
        yield name, Layer(op, (*inputs, *gates), {}, "gated_delta_decode", PART * shape.key_dim * 4)
    for name, case in real(SPACE_CASES):
        shape = case.shape(dtype)
        op, _ = state_space.pick(shape, "gpu", architecture=target.architecture)
        x, of_heads = spec(dtype, SEQS, shape.num_heads, shape.head_dim), spec(f32, shape.num_heads)
        written = spec(dtype, SEQS, shape.num_groups, shape.state_dim)
        inputs = x, spec(f32, SEQS, shape.num_heads), of_heads, written, written, of_heads
        yield name, Layer(op, inputs, {}, "state_space_decode", PART * shape.state_dim * 4)
    for name, case in real(CONV_CASES):
        shape = case.shape(dtype)
        op, _ = causal_conv.pick(shape, "gpu", architecture=target.architecture)
        inputs = spec(dtype, SEQS, shape.num_channels), spec(dtype, shape.kernel_size, shape.num_channels)
        settings: dict[str, Any] = {"activation": case.activation}
        if case.has_bias:
            settings["bias_c"] = jnp.zeros(shape.num_channels, dtype)
        block_bytes = shape.kernel_size * thread_block_channels(shape.num_channels, dtype) * dtype.itemsize
        yield name, Layer(op, inputs, settings, "causal_conv_decode", block_bytes)


def real[Case](cases: Mapping[str, Case]) -> list[tuple[str, Case]]:
    """Return the cases of real models."""
    return [(name, case) for name, case in cases.items() if not name.startswith("tiny")]


def spec(dtype: Any, *shape: int) -> Any:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_layer(layer: Layer, target: Target) -> Row:
    """Compile a step of `NUM_LAYERS` such layers and return its row."""
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

    program = compile_program(function, (pool, layer.inputs, batch), target, donated=0, as_engine=True)
    missed = ptxas_misses(program) + pool_misses(program, pool, makers=r"copy|fusion|dynamic-\S*|while")
    input_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in layer.inputs)
    if program.memory.temp_size_in_bytes > TEMP_LIMIT + NUM_LAYERS * input_bytes:
        missed.append("scratch")
    return {
        **kernel_row(layer, program),
        "temp_MiB": program.temp_mib,
        "launches": sum("kCommandBuffer" not in line for line in program.thunks if ": k" in line),
        "seconds": program.seconds,
        "missed": missed + graph_misses(program),
    }


def kernel_row(layer: Layer, program: Program) -> Row:
    """Return the row of the cost sheet; nothing for a kernel that was compiled before."""
    text = program.messages
    if layer.kernel not in (kernels := ptx.read_kernels(text)):
        return {}
    registers, _ = read_ptxas(text)[layer.kernel]
    threads = kernels[layer.kernel].threads
    held = occupancy(registers, threads, program.smem[layer.kernel])
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

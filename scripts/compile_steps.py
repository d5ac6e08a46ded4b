#!/usr/bin/env python3
"""Compile the whole step of real models for hardware that is not there, and check what the compiler made of it.

For each model the plain decode step, the plain step of the largest bucket and the full one, or the largest step of one
that pools, on one device or spread over several. Checked: the KV pool is updated in place, scratch does not grow with
the pool, the program holds no copy of weights or pool, devices exchange two sums a layer, three where an MLP is beside
experts, and what little the embedding and sampling need, on a GPU no branch or loop asks the host, and on one the plain
decode step and the one that pools are one command buffer (CUDA graph). Run by scripts/compile_check.sh, which makes the
environments.
"""

from __future__ import annotations

# ruff: noqa: E402  libtpu reads the environment when it is loaded
import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jaxllm.check.compilers import compiler_environment, describe_devices
from jaxllm.execution.hardware import HARDWARE, find_topology

for compiled_for in (HARDWARE["v6e"], HARDWARE["h100"]):
    os.environ |= compiler_environment(compiled_for, dict(os.environ))

import jax
from jax.sharding import Mesh
from jax.stages import Compiled
from shapes import MODELS, with_layers

from jaxllm.check.hlo import count_collectives
from jaxllm.config import EngineArgs
from jaxllm.config.resolve_pooling import is_causal
from jaxllm.engine.core.kv_cache_size import step_config
from jaxllm.engine.core.model import make_model
from jaxllm.execution import kv_pool
from jaxllm.execution.buckets import pick_bucket
from jaxllm.execution.compiler import ProgramKey, StepCompiler, describe
from jaxllm.execution.mesh import MODEL_AXIS, make_mesh, param_sharding
from jaxllm.execution.pooled_step import PoolShape
from jaxllm.execution.step import StepShape
from jaxllm.loading.open import open_config
from jaxllm.models import get_family
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import array_specs
from jaxllm.sampling.shards import VocabShards

STEPS = ("decode", "largest", "full")
POOLED = "pooled"
"""The only step of a model that pools: its largest."""
# No power of two, so that no activation is as large as a weight.
SEQS, TOKENS, CONTEXT, BLOCK_SIZE = 64, 2000, 8192, 64
# A smaller pool would fit into VMEM, and some of them are brought there.
BLOCKS = (1025, 2049)
ENCODER_BLOCKS = (2049, 4097)
"""The same for an encoder, whose pool is of one layer."""
SPARE_SLOTS = 1.25
"""The slots for snapshots in the second program of a model with recurrent states, as a part of its sequences."""
SLACK = 2**20  # bytes of scratch; a thousandth of what so many more blocks take
GRAPHS_JAX = (0, 12)
"""Older versions of jax put no Mosaic GPU kernel into a CUDA graph."""
LAYER_NODES, NORM_NODES, LATENT_NODES, MOE_NODES, SHARED_NODES, OTHER_NODES = 12, 2, 3, 25, 4, 36
"""The most launches of a layer, more if it norms queries and keys, attends over latents, has experts or one that all
share, and of all the rest, in a plain decode step. Parts of weights, a matmul, a softmax and a sort choose the experts,
12 launches with two more sorts group the rows, and with many such layers XLA computes in each anew what attention's
kernels need of a step, in 5 launches."""


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a TPU topology such as v6e:1x1, or a GPU such as h100")
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--layers", type=int, help="compile fewer layers")
    parser.add_argument("--quantized", action="store_true", help="weights in the checkpoint's format, not bfloat16")
    parser.add_argument("--steps", nargs="+", choices=(*STEPS, POOLED), help="check only these")
    parser.add_argument("--start", action="store_true", help="compile an engine's programs in its order, check nothing")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    args = parser.parse_args()
    mesh = find_target(args.target, args.tensor_parallel_size)
    check = compile_all if args.start else partial(check_model, steps=args.steps)
    make, rows = partial(make_compiler, mesh=mesh, num_layers=args.layers, is_quantized=args.quantized), []
    for row in ({"model": model} | row for model in args.models for row in check(make(model))):
        rows.append(row | {"target": args.target, "devices": mesh.size, "jax": jax.__version__})
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["missed"] for row in rows))


def find_target(name: str, num_devices: int) -> Mesh:
    """Return the mesh of the target's first devices."""
    hardware, count = find_topology(name)
    devices = describe_devices(hardware, name, num_devices if hardware.platform == "gpu" else count)
    if num_devices > len(devices):
        raise SystemExit(f"{name} has {len(devices)} devices, not {num_devices}")
    return make_mesh(devices[:num_devices])


def compile_all(compiler: StepCompiler) -> Iterator[dict[str, Any]]:
    """Yield what each program of an engine takes to lower and to compile, in the order in which it compiles them."""
    for key in compiler.programs():
        _, seconds = timed_compile(compiler, key, BLOCKS[-1], compiler.options)
        yield {"program": describe(key), **seconds, "missed": []}


def check_model(compiler: StepCompiler, *, steps: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Yield a row per program: what the compiler says, and what it misses of what is wanted."""
    programs = find_programs(compiler)
    for title in steps or programs:
        described = {"step": title, "attention": "+".join(attention_of(compiler))}
        if states := states_of(compiler):
            described["states"] = "+".join(states)
        yield described | check_program(compiler, programs[title])


def find_programs(compiler: StepCompiler) -> dict[str, StepShape | PoolShape]:
    """Return a model's programs by the names of their steps."""
    decode, largest = pick_bucket(compiler.buckets, SEQS, SEQS), compiler.buckets[-1]
    if not compiler.config.generates:
        return {POOLED: compiler.pool_shape(largest, by_token=False)}
    return {
        "decode": compiler.step_shape(decode, is_full=False, has_chunks=False),
        "largest": compiler.step_shape(largest, is_full=False),
        "full": compiler.step_shape(largest, is_full=True),
    }


def attention_of(compiler: StepCompiler) -> list[str]:
    """Return the implementations of attention, of which cache groups may have different ones."""
    return list(dict.fromkeys(group.attention.implementation for group in compiler.config.groups))


def states_of(compiler: StepCompiler) -> list[str]:
    """Return the implementations of each group's ops of recurrent state: the convolution's, then the scan's."""
    return [name for group in compiler.config.states for name in group.ops.implementations]


def make_compiler(name: str, *, mesh: Mesh, num_layers: int | None, is_quantized: bool) -> StepCompiler:
    """Return the compiler of a model's steps as an engine has it; its weights are bfloat16 or the checkpoint's own."""
    hf = with_layers(MODELS[name], num_layers)
    if not is_quantized:
        hf = {key: value for key, value in hf.items() if key != "quantization_config"}
    config = get_family(hf["architectures"][0]).read_config(hf)
    context = min(CONTEXT, config.max_position_embeddings)
    arguments = EngineArgs(
        model=name,
        dtype="bfloat16",
        tensor_parallel_size=mesh.size,
        max_num_seqs=SEQS,
        # Texts go through an encoder in one step.
        max_num_batched_tokens=TOKENS if is_causal(config) else max(TOKENS, context + 8),
        max_model_len=context,
        block_size=BLOCK_SIZE,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf))
        engine = arguments.create_engine_config(devices=mesh.devices.tolist(), checkpoint=open_config(folder))
    return StepCompiler(step_config(engine), make_model(engine), mesh)


def check_program(compiler: StepCompiler, shape: StepShape | PoolShape) -> dict[str, Any]:
    """Compile with few blocks and with many, and for an encoder with as many as it has."""
    temps, missed, row = [], [], {}
    # The loops of plain XLA stay outside of command buffers.
    has_kernels = {*attention_of(compiler), *states_of(compiler)} == {"gpu"}
    # So do those over chunks of recurrent states, which a step of decodes alone has none of.
    loops = bool(compiler.config.states) and not (isinstance(shape, StepShape) and shape.decodes_only)
    layout, blocks = compiler.config.kv_layout, BLOCKS
    if not any(group.causal for group in layout.groups):
        blocks = (layout.most_wanted, *ENCODER_BLOCKS)
    for num_blocks in blocks:
        # Recurrent states have more slots at last, too, where there are any.
        with patch.object(kv_pool, "SPARE_PART", SPARE_SLOTS if layout.states and temps else kv_pool.SPARE_PART):
            memory, hlo, listing, seconds = compile_program(compiler, shape, num_blocks)
            pool_bytes = sum(device_bytes(x) for x in jax.tree.leaves(compiler.caches.specs(num_blocks)))
            copies = find_copies(hlo, compiler, num_blocks)
        if memory.alias_size_in_bytes < pool_bytes:
            missed.append(f"pool of {pool_bytes} bytes, aliased {memory.alias_size_in_bytes}")
        if copies:
            missed.append(f"copies of weights or pool: {copies[:3]}")
        if cuts := find_expert_copies(hlo, compiler):
            missed.append(f"copies of a layer's experts: {cuts[:3]}")
        temps.append(memory.temp_size_in_bytes)
        collectives = {each.kind: each.count for each in count_collectives(hlo)}
        row = {
            **seconds,
            "temp_mib": round(temps[-1] / 2**20, 1),
            "alias_mib": round(memory.alias_size_in_bytes / 2**20, 1),
            "thunks": count_thunks(listing),
            "nodes": count_nodes(listing),
            "collectives": collectives,
        }
        if has_kernels and not loops and (asking := find_host_predicates(listing, hlo)):
            missed.append(f"the host is asked: {asking}")
    if temps[-1] - temps[-2] > max(0.01 * temps[-2], SLACK):
        missed.append(f"scratch {temps[-2]} with {blocks[-2]} blocks, {temps[-1]} with {blocks[-1]}")
    expected = expected_collectives(compiler, shape)  # XLA may make one of several
    if any(count > expected.get(kind, 0) for kind, count in row["collectives"].items()):
        missed.append(f"collectives should be {expected}")
    is_plain_decode = isinstance(shape, StepShape) and not shape.is_full and shape.batch.bucket.num_tokens <= SEQS
    is_graph = row["thunks"] == {"kCommandBuffer": 1} or jax.__version_info__ < GRAPHS_JAX
    if has_kernels and compiler.mesh.size == 1 and (is_plain_decode or isinstance(shape, PoolShape)) and not is_graph:
        missed.append("not one command buffer")
    if has_kernels and compiler.mesh.size == 1 and is_plain_decode and row["nodes"] > most_nodes(compiler.model.config):
        missed.append(f"more launches than {most_nodes(compiler.model.config)}")
    return row | {"missed": missed}


def most_nodes(config: ModelConfig) -> int:
    """Return how many launches a plain decode step should need at most."""
    more = (
        layer.qk_norm * NORM_NODES
        + bool(layer.latent) * LATENT_NODES
        + (MOE_NODES + bool(layer.moe.shared_size) * SHARED_NODES if layer.moe else 0)
        for layer in config.layers
    )
    return len(config.layers) * LAYER_NODES + sum(more) + OTHER_NODES


def expected_collectives(compiler: StepCompiler, shape: StepShape | PoolShape) -> dict[str, int]:
    """Return how many collectives of each kind a step should need at most."""
    vocab = VocabShards(compiler.model.config.vocab_size, compiler.mesh.size, MODEL_AXIS)
    if vocab.num_devices == 1:
        return {}
    is_spread = vocab.vocab_size % vocab.num_devices == 0
    # Attention and MLP, or experts, and what is beside those; and the embedding.
    in_layers = sum(
        layer.has_mixer + layer.has_mlp * (2 if layer.moe and layer.moe.shared_size else 1)
        for layer in compiler.model.config.layers
    )
    expected = {"all-reduce": in_layers + is_spread}
    if isinstance(shape, PoolShape):
        return expected
    if not shape.is_full and vocab.can_sample:
        # The tiles' maxima and then their sums; and the logits of the tile where either leads.
        expected |= {"all-gather": 2, "all-reduce": expected["all-reduce"] + 2}
        return expected | ({"collective-permute": 1} if vocab.borrowed else {})
    return expected | ({"all-gather": 1} if is_spread else {})


def device_bytes(spec: jax.ShapeDtypeStruct) -> int:
    """Return the bytes that one device holds of an array."""
    assert spec.sharding is not None
    return math.prod(spec.sharding.shard_shape(spec.shape)) * spec.dtype.itemsize


def compile_program(
    compiler: StepCompiler, shape: StepShape | PoolShape, num_blocks: int
) -> tuple[Any, str, str, dict[str, float]]:
    """Return the compiler's memory analysis, the final HLO, on a GPU the thunks, and the seconds of either stage."""
    platform = compiler.config.platform
    options = compiler.options
    with tempfile.TemporaryDirectory() as folder:
        if platform == "gpu":
            options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled, seconds = timed_compile(compiler, shape, num_blocks, options)
        listing = read_thunks(Path(folder)) if platform == "gpu" else ""
        return compiled.memory_analysis(), compiled.as_text() or "", listing, seconds


def timed_compile(
    compiler: StepCompiler, key: ProgramKey, num_blocks: int, options: dict[str, Any]
) -> tuple[Compiled, dict[str, float]]:
    """Return a program, and the seconds that lowering and compiling it took."""
    start = time.monotonic()
    lowered = compiler.lower(key, num_blocks)
    lowered_at = time.monotonic()
    compiled = lowered.compile(compiler_options=options)
    return compiled, {"lower_s": round(lowered_at - start, 1), "compile_s": round(time.monotonic() - lowered_at, 1)}


def find_copies(hlo: str, compiler: StepCompiler, num_blocks: int) -> list[str]:
    """Return the copies in a program that are as large as a parameter of 1 MiB or more, or as the pool."""
    specs = array_specs(compiler.model.param_specs()).values()
    shapes = [param_sharding(compiler.mesh, spec).shard_shape(spec.shape) for spec in specs]
    shapes += [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(compiler.caches.specs(num_blocks))]
    sizes = {math.prod(shape) for shape in shapes}
    # A copy-start gives target and source; S(1) is a TPU's VMEM, where operands are brought ahead of their use.
    found = re.findall(r" = (\S+|\(.*?\)) copy(?:-start)?\(", hlo)
    arrays = [array for array in found if not (array.startswith("(") and "S(1)" in array)]
    copies = [tuple(map(int, dims.split(","))) for array in arrays for dims in re.findall(r"\[([\d,]+)\]", array)[:1]]
    # Weights of the same rows that are put side by side in each step, to be one matmul.
    joined = re.findall(r"= (\w+\[\S+\])\S* fusion\(%params\w+\S*, %params[^)]*\),.* calls=%fused_concatenate", hlo)
    return [str(shape) for shape in copies if math.prod(shape) in sizes and math.prod(shape) >= 2**20] + joined


def find_expert_copies(hlo: str, compiler: StepCompiler) -> list[str]:
    """Return what a program computes that is as large as the weights of a layer's experts, as a layer cut from a stack.

    The kernels take the stack as it is. No activation is as large, by its bytes, as all experts of a layer are.
    """
    arrays = array_specs(compiler.model.param_specs()).values()
    experts = [spec for spec in arrays if spec.num_experts and spec.num_inputs]
    shapes = [param_sharding(compiler.mesh, spec).shard_shape(spec.shape) for spec in experts]
    sizes = {math.prod(shape[spec.stacked :]) for spec, shape in zip(experts, shapes, strict=True)}
    found = re.findall(r"= (\w+\[([\d,]+)\])\S* (?:copy|copy-start|convert|dynamic-slice|fusion|transpose)\(", hlo)
    return [array for array, dims in found if math.prod(map(int, dims.split(","))) in sizes]


def read_thunks(folder: Path) -> str:
    """Return what XLA:GPU will run for the step, one line per thunk, indented in what holds it."""
    files = sorted(folder.glob("*thunk_sequence*.txt"), key=lambda file: file.stat().st_size)
    if not files:
        raise SystemExit(f"XLA wrote no thunk sequence, only {[file.name for file in folder.iterdir()]}")
    return files[-1].read_text()


def count_thunks(listing: str) -> dict[str, int]:
    """Count the thunks of the outermost sequence by kind."""
    return dict(Counter(re.findall(r"^\d+: (k\w+)", listing, re.MULTILINE)))


def count_nodes(listing: str) -> int:
    """Count what is launched, in command buffers or not; a loop's body once."""
    return len(re.findall(r"^ *\d+: k(?!CommandBuffer|While)", listing, re.MULTILINE))


def find_host_predicates(listing: str, hlo: str) -> list[str]:
    """Return the branches and loops of which XLA:GPU brings the predicate to the host; of counted loops it need not."""
    branches = re.findall(r"^\d+: (kConditional.*)", listing, re.MULTILINE)
    loops = re.findall(r"^ *(%while\S*) = .* while\((?!.*known_trip_count)", hlo, re.MULTILINE)
    return [*branches, *(loops if listing else ())]


if __name__ == "__main__":
    sys.exit(main())

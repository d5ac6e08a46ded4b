#!/usr/bin/env python3
"""Compile the whole step of real models for hardware that is not there, and check what the compiler made of it.

For each model the plain decode step, the plain step of the largest bucket and the full one. Checked: the KV pool is
updated in place, scratch does not grow with the pool, the program holds no copy of weights or pool, and on a GPU the
plain decode step is one command buffer (CUDA graph). Run by scripts/compile_check.sh, which makes the environments.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is taken, so others may compile too
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
os.environ |= {"JAX_PLATFORMS": "cpu"} | TPU_ENVIRONMENT

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shapes import MODELS

from jaxllm.execution.buckets import pick_bucket
from jaxllm.execution.compiler import StepCompiler, StepConfig
from jaxllm.execution.options import compiler_options
from jaxllm.execution.step import StepShape
from jaxllm.models import Model, get_family
from pallas_kernels.paged_attention import AttentionShape, pick
from pallas_kernels.targets import gpu_target

SEQS, TOKENS, CONTEXT, BLOCK_SIZE = 64, 2048, 8192, 64
BLOCKS = (33, 1025)


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a TPU topology such as v6e:1x1, or h100")
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--layers", type=int, help="compile fewer layers")
    args = parser.parse_args()
    platform, sharding = find_target(args.target)
    rows = [row for model in args.models for row in check_model(model, platform, sharding, args.layers)]
    for row in rows:
        row["target"], row["jax"] = args.target, jax.__version__
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["missed"] for row in rows))


def find_target(name: str) -> tuple[str, NamedSharding]:
    """Return the platform, and the placement on the target's first device."""
    if name == "h100":
        platform, arguments = "gpu", {"topology_name": "h100", "target_config": gpu_target("h100"), "topology": "1x1x1"}
        topology = topologies.get_topology_desc(platform="cuda", **arguments)
    else:
        platform, topology = "tpu", topologies.get_topology_desc(platform="tpu", topology_name=name)
    return platform, NamedSharding(Mesh(topology.devices[:1], ("model",)), PartitionSpec())


def check_model(name: str, platform: str, sharding: NamedSharding, num_layers: int | None) -> Iterator[dict[str, Any]]:
    """Yield a row per program: what the compiler says, and what it misses of what is wanted."""
    hf = MODELS[name] | ({"num_hidden_layers": num_layers} if num_layers else {})
    compiler = make_compiler(hf, platform)
    decode, largest = pick_bucket(compiler.buckets, SEQS, SEQS), compiler.buckets[-1]
    programs = {
        "decode": compiler.step_shape(decode, is_full=False),
        "largest": compiler.step_shape(largest, is_full=False),
        "full": compiler.step_shape(largest, is_full=True),
    }
    for title, shape in programs.items():
        yield {"model": name, "step": title} | check_program(compiler, shape, platform, sharding)


def make_compiler(hf: dict[str, Any], platform: str) -> StepCompiler:
    """Return the compiler of a model's steps with the platform's own attention."""
    config = get_family(hf["architectures"][0]).read_config(hf)
    bfloat16 = jnp.dtype("bfloat16")
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    attention, reason = pick(AttentionShape(*heads, BLOCK_SIZE, bfloat16, bfloat16), platform)
    if reason is not None:
        raise SystemExit(f"the kernels of {platform} refuse this model: {reason}")
    settings = StepConfig(
        max_num_seqs=SEQS,
        max_num_batched_tokens=TOKENS,
        max_model_len=CONTEXT,
        attention=attention,
        max_logprobs=20,
        platform=platform,
    )
    return StepCompiler(settings, Model(config, bfloat16, stacked=platform != "gpu"))


def check_program(compiler: StepCompiler, shape: StepShape, platform: str, sharding: NamedSharding) -> dict[str, Any]:
    """Compile with few blocks and with many."""
    temps, missed, row = [], [], {}
    for num_blocks in BLOCKS:
        start = time.monotonic()
        memory, hlo, thunks = compile_program(compiler, shape, num_blocks, platform, sharding)
        pool_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in compiler.pool_spec(num_blocks))
        if memory.alias_size_in_bytes < pool_bytes:
            missed.append(f"pool of {pool_bytes} bytes, aliased {memory.alias_size_in_bytes}")
        if copies := find_copies(hlo, compiler, num_blocks):
            missed.append(f"copies of weights or pool: {copies[:3]}")
        temps.append(memory.temp_size_in_bytes)
        row = {
            "compile_s": round(time.monotonic() - start, 1),
            "temp_mib": round(temps[-1] / 2**20, 1),
            "alias_mib": round(memory.alias_size_in_bytes / 2**20, 1),
            "thunks": thunks,
        }
    if abs(temps[1] - temps[0]) > 0.01 * temps[0]:
        missed.append(f"scratch {temps[0]} with {BLOCKS[0]} blocks, {temps[1]} with {BLOCKS[1]}")
    is_plain_decode = not shape.is_full and shape.batch.bucket.num_tokens <= SEQS
    if platform == "gpu" and is_plain_decode and row["thunks"] != {"kCommandBuffer": 1}:
        missed.append("not one command buffer")
    return row | {"missed": missed}


def compile_program(
    compiler: StepCompiler, shape: StepShape, num_blocks: int, platform: str, sharding: NamedSharding
) -> tuple[Any, str, dict[str, int]]:
    """Return the compiler's memory analysis, the final HLO, and on a GPU the thunks by kind."""
    options = compiler_options(platform, jnp.bfloat16, batch_invariant=False) or {}
    with tempfile.TemporaryDirectory() as folder, jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        if platform == "gpu":
            options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = compiler.lower(shape, num_blocks, sharding).compile(compiler_options=options or None)
        thunks = count_thunks(read_thunks(Path(folder))) if platform == "gpu" else {}
        return compiled.memory_analysis(), compiled.as_text() or "", thunks


def find_copies(hlo: str, compiler: StepCompiler, num_blocks: int) -> list[str]:
    """Return the copies in a program that are as large as a parameter of 1 MiB or more, or as the pool."""
    specs = [*compiler.model.param_specs().values(), *compiler.pool_spec(num_blocks)]
    sizes = {math.prod(spec.shape) for spec in specs}
    found = re.findall(r"= \w+\[([\d,]+)\]\S* copy(?:-start)?\(", hlo)
    shapes = [tuple(map(int, dims.split(","))) for dims in found]
    return [str(shape) for shape in shapes if math.prod(shape) in sizes and math.prod(shape) >= 2**20]


def read_thunks(folder: Path) -> str:
    """Return what XLA:GPU will run for the step, one line per thunk."""
    files = sorted(folder.glob("*thunk_sequence*.txt"), key=lambda file: file.stat().st_size)
    if not files:
        raise SystemExit(f"XLA wrote no thunk sequence, only {[file.name for file in folder.iterdir()]}")
    return files[-1].read_text()


def count_thunks(text: str) -> dict[str, int]:
    """Count the thunks of the outermost sequence by kind."""
    counts: dict[str, int] = {}
    for kind in re.findall(r"^\d+: (k\w+)", text, re.MULTILINE):
        counts[kind] = counts.get(kind, 0) + 1
    return counts


if __name__ == "__main__":
    sys.exit(main())

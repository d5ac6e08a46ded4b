"""Ask the TPU's compiler whether a device holds as many KV blocks as `jaxllm check` says, and no more.

For each model and topology, sized with all of the memory (gpu_memory_utilization=1): the largest step, which needs the
most, compiles with the N blocks that are named, and with 1.1 N the compiler says that it is out of memory. It is also
asked for 1.05, 1.02 and 1.01 N, which shows how much of the memory N leaves unused. Before that, the compiler is asked
whether the table of hardware has the memory and the devices right, for each topology up to 8 devices. XLA:GPU does not
refuse programs for their size, so this is for TPUs. Run by scripts/compile_check.sh.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.check.compilers import TPU_ENVIRONMENT
from jaxllm.sampling.inputs import Sampling

os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"} | TPU_ENVIRONMENT

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, PartitionSpec
from lib.results import make_parser, save
from lib.shapes import MODELS

from jaxllm.check.compilers import describe_devices
from jaxllm.check.fitting import fit, out_of_memory
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.loading.open import open_config
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.hardware import HARDWARE, MIB, find_topology

CASES = (
    ("llama-3.2-1b", "v5e:1x1", 1),
    ("llama-3.2-1b", "v5e:2x2", 4),
    ("qwen3-8b", "v6e:2x4", 8),
    ("llama-3.3-70b", "v6e:2x4", 8),
    ("qwen3-32b", "v5p:2x2x1", 4),
    ("llama-3.3-70b", "tpu7x:2x2x1", 8),
)
FACTORS = (1.1, 1.05, 1.02, 1.01)


def main() -> int:
    """Compile, print and write; returns 1 if a number of blocks is not what the compiler says."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds this")
    args = parser.parse_args()
    rows = []
    is_right = [check_table(topology) for topology in table_topologies() if args.only in topology]
    for model, topology, num_devices in CASES:
        if args.only in f"{model} {topology}":
            rows.append(check_case(model, topology, num_devices))
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    save(args.json, rows)
    return int(not all(is_right) or not all(row["N"] == "compiles" and row["1.1 N"] != "compiles" for row in rows))


def table_topologies() -> list[str]:
    """Return the TPU topologies of one host."""
    tpus = (hardware for hardware in HARDWARE.values() if hardware.platform == "tpu")
    return [name for hardware in tpus for name, count in hardware.topologies().items() if count <= 8]


def check_table(topology: str) -> bool:
    """Return whether the compiler accepts an array of all the memory in the table, and refuses 2 MiB more."""
    hardware, count = find_topology(topology)
    devices = describe_devices(hardware, topology, count)
    right = len(devices) == count and devices[0].device_kind == hardware.device_kind
    right = right and takes_array(devices[0], hardware.memory_bytes)
    right = right and not takes_array(devices[0], hardware.memory_bytes + 2 * MIB)
    print(f"{topology}: {hardware.memory_bytes // MIB:,} MiB on each of {count} devices: {right}", flush=True)
    return right


def takes_array(device: Any, num_bytes: int) -> bool:
    """Return whether a program with an array of `num_bytes` compiles; it changes a small one."""
    sharding = NamedSharding(make_mesh([device]), PartitionSpec())
    large = jax.ShapeDtypeStruct((num_bytes // MIB, 1024, 1024), jnp.uint8, sharding=sharding)
    small = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=sharding)
    program = jax.jit(lambda large, small: (large, small + 1), donate_argnums=0)
    try:
        program.trace(large, small).lower(lowering_platforms=("tpu",)).compile()
    except JaxRuntimeError as error:
        out_of_memory(error)
        return False
    return True


def check_case(model: str, topology: str, num_devices: int) -> dict[str, Any]:
    """Size one model, and compile its largest step with more and fewer blocks."""
    hardware, count = find_topology(topology)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(MODELS[model]))
        checkpoint = open_config(str(path))
    # Many and long requests: the memory decides, not what they can use.
    arguments = EngineArgs(
        model=model,
        tensor_parallel_size=num_devices,
        gpu_memory_utilization=1.0,
        max_num_seqs=256,
        max_model_len=32_768,
    )
    sized = fit(arguments, checkpoint, hardware, describe_devices(hardware, topology, count))
    if sized.reason is not None or sized.size.memory is None:
        raise SystemExit(f"{model} does not fit on {topology}: {sized.reason}")
    compiler = StepCompiler(sized.size.steps, sized.model, sized.config.mesh)
    blocks = sized.num_blocks
    return {
        "model": model,
        "topology": topology,
        "devices": num_devices,
        "jax": jax.__version__,
        "block_bytes": sum(group.block_bytes for group in sized.size.memory.layout.groups),
        "blocks": blocks,
        "N": compile_with(compiler, blocks) or "compiles",
        "1.1 N": compile_with(compiler, math.ceil(1.1 * blocks)) or "compiles",
        "least refused": least_refused(compiler, blocks),
    }


def compile_with(compiler: StepCompiler, num_blocks: int) -> str | None:
    """Compile the largest step; return what the compiler says if it is out of memory."""
    largest = compiler.shapes.step_shape(compiler.shapes.buckets[-1], Sampling.FULL)
    try:
        compiler.compile(largest, num_blocks)
    except JaxRuntimeError as error:
        return out_of_memory(error)
    return None


def least_refused(compiler: StepCompiler, num_blocks: int) -> float:
    """Return the smallest of a few factors with which the number of blocks is refused; a refusal takes two seconds."""
    refused = math.inf
    for factor in FACTORS:
        if compile_with(compiler, math.ceil(factor * num_blocks)) is None:
            break
        refused = factor
    return refused


if __name__ == "__main__":
    sys.exit(main())

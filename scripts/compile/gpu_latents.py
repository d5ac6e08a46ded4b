"""Compile the GPU's attention over latents for an H100 that is not there, with the real ptxas, and check what it takes.

Needs jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc (ptxas 13.3 or later) in the environment, and no GPU.
Checked, for each model's shape, dtype of the pool and block size: no register is spilled, shared memory suffices, the
pool is updated in place through two layers, without a copy, and those are one command buffer, with longer chunks and of
decodes alone.

At the end the cost sheet, as that of `gpu_kernels`. These are static figures; nothing runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from jaxllm.check.compilers import compiler_environment
from jaxllm.execution.hardware import HARDWARE

os.environ |= compiler_environment(HARDWARE["h100"], dict(os.environ))
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from compile.gpu_compiler import find_device
from compile.gpu_row import compile_row, report
from pallas_kernels.implementations import LATENT_ATTENTION
from pallas_kernels.latent_attention import LatentAttention
from pallas_kernels.latent_attention.cases import CASES
from pallas_kernels.paged_attention import AttentionBatch

NUM_LAYERS, NUM_BLOCKS, MAX_CONTEXT, SEQUENCES = 2, 4096, 8192, 64
STEPS = {"decodes": (64, False), "mixed": (2048, True)}
"""The tokens of each step, and whether there are longer chunks."""
NAMES = {"latent_write", "latent_decode", "latent_prefill", "combine_splits"}


def main() -> int:
    """Compile, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--shares", nargs="+", type=int, default=[1, 8], help="devices that share out the heads")
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "float8_e4m3fn"], metavar="DTYPE", help="of the pool")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    sharding, rows = find_device(), []
    for name, share in itertools.product(args.cases, args.shares):
        num_heads, rest = divmod(CASES[name].num_heads, share)
        case = CASES[name]._replace(num_heads=num_heads)
        reason = (
            f"{share} devices cannot share out its heads" if rest else LATENT_ATTENTION["gpu"].refusal(case.shape())
        )
        if reason:
            print(f"{name} on {share} devices: {reason}", flush=True)
            continue
        # How many heads there are changes nothing of how a pool is read.
        kv_dtypes = args.kv if share == args.shares[0] else args.kv[:1]
        for kv, block_size, step in itertools.product(kv_dtypes, args.block_sizes, STEPS):
            op = LatentAttention(case.shape(block_size, kv_dtype=getattr(jnp, kv)), "gpu")
            row = {"case": f"{name}/{share}", "kernel": step, "kv": kv, "block": block_size}
            row |= compile_step(op, step, sharding)
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return report(rows, NAMES, args.json)


def compile_step(op: LatentAttention, step: str, sharding: NamedSharding) -> dict[str, Any]:
    """Return what the compilers say of two layers of a step, each on the output of the one before."""
    arguments = abstract_arguments(op, *STEPS[step])

    def function(pool: Any, q_tnh: Any, latents_th: Any, batch: AttentionBatch) -> Any:
        for layer in range(NUM_LAYERS):
            settings = {"layer": layer, "num_layers": NUM_LAYERS, "scale": op.shape.key_dim**-0.5}
            out_tnl, pool = op(q_tnh, latents_th, pool, batch, **settings)
            q_tnh = jnp.concatenate([out_tnl, q_tnh[..., op.shape.latent_dim :]], axis=-1)
        return q_tnh, pool

    jitted = jax.jit(function, donate_argnums=0, in_shardings=sharding, out_shardings=sharding)
    return compile_row(jitted, arguments, sharding, pool=arguments[0].latents, is_graph=True)


def abstract_arguments(op: LatentAttention, t: int, has_tiles: bool) -> tuple[Any, ...]:
    """Return shapes of the arguments."""
    shape, s = op.shape, SEQUENCES
    tables_sm, tiles_i = (s, MAX_CONTEXT // shape.block_size), (has_tiles * (s + t // op.tiles.query),)
    shapes = [(t,), tables_sm, (s,), (s,), (s,), (), tiles_i, tiles_i, ()]
    batch = AttentionBatch(*(jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes))  # pyright: ignore[reportArgumentType]
    q, latents = (
        jax.ShapeDtypeStruct((t, *x), shape.dtype) for x in ((shape.num_heads, shape.key_dim), (shape.key_dim,))
    )
    return op.pool_spec(NUM_LAYERS, NUM_BLOCKS), q, latents, batch


if __name__ == "__main__":
    sys.exit(main())

"""There are several ways of running the op; this says what each can do, and which one a platform gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.implementations import Implementation
from pallas_kernels.paged_attention.layout import FLOAT8
from pallas_kernels.paged_attention.tiles import XLA_TILES, Tiles
from pallas_kernels.pool_op import make_cpu_pool, settle_cpu_pool
from pallas_kernels.targets import hopper_refusal

from .layout import LANES, LatentShape, gpu_pool_spec, latent_pool_spec, tpu_pool_spec

MOST_TPU_HEAD_BYTES = 256
"""The heads of a device times the bytes of a number: a query tile of more leaves too little of a TPU's fast memory."""


def _load_xla(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .xla import xla_latent_attention

    return xla_latent_attention


def _load_cpu(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .cpu import cpu_latent_attention

    return cpu_latent_attention


def _load_tpu(architecture: str | None) -> Callable[..., tuple[Array, Any]]:
    from .tpu import tpu_latent_attention

    return partial(tpu_latent_attention, architecture=architecture)


def _load_gpu(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .gpu import gpu_latent_attention

    return gpu_latent_attention


def _cpu_tiles(shape: LatentShape, _: str | None) -> Tiles:
    from .cpu import cpu_tiles

    return cpu_tiles(shape)


def _tpu_tiles(shape: LatentShape, architecture: str | None) -> Tiles:
    from .tpu import tpu_tiles

    return tpu_tiles(shape, architecture)


def _gpu_tiles(shape: LatentShape, _: str | None) -> Tiles:
    from .gpu import gpu_tiles

    return gpu_tiles(shape)


def _prepare_cpu(shape: LatentShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


def _refuse_on_cpu(shape: LatentShape) -> str | None:
    sizes = shape.latent_dim, shape.rope_dim, shape.block_size
    if any(size % 16 for size in sizes):
        return "latents, their rotated part and block_size must be multiples of 16, not {}, {} and {}".format(*sizes)
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    from pallas_kernels.native.compiling import refuse

    return refuse()


def _refuse_on_tpu(shape: LatentShape) -> str | None:
    if shape.latent_dim % LANES:
        return f"latents must have a multiple of {LANES} numbers, not {shape.latent_dim}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    most = MOST_TPU_HEAD_BYTES // jnp.dtype(shape.dtype).itemsize
    if shape.num_heads > most:
        return f"a device can have at most {most} heads in {jnp.dtype(shape.dtype).name}, not {shape.num_heads}"
    if shape.kv_dtype != shape.dtype and shape.kv_dtype not in FLOAT8:
        return f"the pool must be of the same dtype or float8, not {jnp.dtype(shape.kv_dtype).name}"
    # A float8 tile has 32 rows.
    block_sizes = (32, 64, 128) if shape.kv_dtype in FLOAT8 else (16, 32, 64, 128)
    if shape.block_size not in block_sizes:
        return f"block_size must be {', '.join(map(str, block_sizes))}, not {shape.block_size}"
    return None


def _refuse_on_gpu(shape: LatentShape) -> str | None:
    from .gpu import refuse

    return refuse(shape)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(
        _load_xla, None, latent_pool_spec, lambda _shape, _architecture: XLA_TILES, 1, lambda _: None
    ),
    "cpu": Implementation(
        _load_cpu,
        "cpu",
        latent_pool_spec,
        _cpu_tiles,
        1,
        _refuse_on_cpu,
        _prepare_cpu,
        make_pool=make_cpu_pool,
        settle_pool=settle_cpu_pool,
    ),
    "tpu": Implementation(_load_tpu, "tpu", tpu_pool_spec, _tpu_tiles, 16, _refuse_on_tpu),
    "gpu": Implementation(
        _load_gpu,
        "gpu",
        gpu_pool_spec,
        _gpu_tiles,
        16,
        _refuse_on_gpu,
        device_refusal=hopper_refusal,
        takes_decodes_alone=True,
    ),
}

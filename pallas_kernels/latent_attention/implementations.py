"""There are several ways of running the op; this says what each can do, and which one a platform gets.

TPUs have no kernel of their own yet and get plain XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.implementations import Implementation
from pallas_kernels.paged_attention.tiles import XLA_TILES, Tiles
from pallas_kernels.pool_op import make_cpu_pool, settle_cpu_pool
from pallas_kernels.targets import hopper_refusal

from .layout import LatentShape, gpu_pool_spec, latent_pool_spec


def _load_xla(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .xla import xla_latent_attention

    return xla_latent_attention


def _load_cpu(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .cpu import cpu_latent_attention

    return cpu_latent_attention


def _load_gpu(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .gpu import gpu_latent_attention

    return gpu_latent_attention


def _cpu_tiles(shape: LatentShape, _: str | None) -> Tiles:
    from .cpu import cpu_tiles

    return cpu_tiles(shape)


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

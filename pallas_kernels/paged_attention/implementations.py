"""There are several ways of running the op; this says what each can do, and which one a platform gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.pool_op import make_cpu_pool, settle_cpu_pool
from pallas_kernels.targets import hopper_refusal

from .layout import FLOAT8, AttentionShape, cpu_pool_spec, fused_pool_spec, split_pool_spec
from .tiles import XLA_TILES, Tiles


class Implementation(NamedTuple):
    """One way of running the op, or another that attends over a pool, whose shapes and pools are its own."""

    load: Callable[[str | None], Callable[..., tuple[Array, Any]]]
    """Import the function for an architecture; it has the signature of `PagedAttention.__call__` with q, k, v, pool,
    batch first, `tiles` and `interpret`, and without `rope` unless it fuses it."""
    platform: str | None
    """The platform where it runs, or None for all. A CPU interprets what belongs elsewhere, slowly."""
    pool_spec: Callable[[Any, int, int], Any]
    tiles: Callable[[Any, str | None], Tiles]
    row_alignment: int
    """Longer chunks start at a multiple of this row."""
    refusal: Callable[[Any], str | None]
    """A function that says why it cannot run a shape, or None if it can."""
    prepare: Callable[[Any, Path | None], None] = lambda _shape, _folder: None
    """See `PagedAttention.prepare`."""
    make_pool: Callable[[Any], Any] = lambda spec: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)
    """Make a pool's arrays, traced."""
    settle_pool: Callable[[Any, int], None] = lambda _pool, _num_layers: None
    """See `PagedAttention.settle_pool`."""
    device_refusal: Callable[[str | None], str | None] = lambda _: None
    """A function that says why it cannot run on a device of its platform, by the architecture, or None if it can."""
    fuses_rope: Callable[[Any], bool] = lambda _: False
    """A function that says whether it rotates q and k, and casts k and v to the pool's dtype. Else it gets them so."""
    takes_decodes_alone: bool = False
    """True if it takes less for a batch without room for tiles, `AttentionBatch.without_tiles`."""


def _load_xla(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .xla import xla_paged_attention

    return xla_paged_attention


def _load_cpu(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .cpu import cpu_paged_attention

    return cpu_paged_attention


def _load_tpu(architecture: str | None) -> Callable[..., tuple[Array, Any]]:
    from .tpu import tpu_paged_attention

    return partial(tpu_paged_attention, architecture=architecture)


def _load_gpu(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .gpu import gpu_paged_attention

    return gpu_paged_attention


def _cpu_tiles(shape: AttentionShape, _: str | None) -> Tiles:
    from .cpu import cpu_tiles

    return cpu_tiles(shape)


def _prepare_cpu(shape: AttentionShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


def _tpu_tiles(shape: AttentionShape, architecture: str | None) -> Tiles:
    from .tpu import tpu_tiles

    return tpu_tiles(shape, architecture)


def _gpu_tiles(shape: AttentionShape, _: str | None) -> Tiles:
    from .gpu import gpu_tiles

    return gpu_tiles(shape)


def _refuse(
    shape: AttentionShape, head_dims: tuple[int, ...], dtypes: tuple[Any, ...], block_sizes: tuple[int, ...]
) -> str | None:
    if shape.head_dim not in head_dims:
        return f"head_dim must be {', '.join(map(str, head_dims[:-1]))} or {head_dims[-1]}, not {shape.head_dim}"
    if shape.dtype not in dtypes:
        return f"dtype must be {' or '.join(jnp.dtype(x).name for x in dtypes)}, not {jnp.dtype(shape.dtype).name}"
    if shape.kv_dtype != shape.dtype and shape.kv_dtype not in FLOAT8:
        return f"the pool must be of the same dtype or float8, not {jnp.dtype(shape.kv_dtype).name}"
    if shape.block_size not in block_sizes:
        return f"block_size must be {', '.join(map(str, block_sizes))}, not {shape.block_size}"
    return None


def _refuse_on_cpu(shape: AttentionShape) -> str | None:
    if shape.head_dim % 16 or shape.block_size % 16:
        return f"head_dim and block_size must be multiples of 16, not {shape.head_dim} and {shape.block_size}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    from pallas_kernels.native.compiling import refuse

    return refuse()


def _refuse_on_tpu(shape: AttentionShape) -> str | None:
    # A float8 tile has 32 rows.
    block_sizes = (32, 64, 128) if shape.kv_dtype in FLOAT8 else (16, 32, 64, 128)
    return _refuse(shape, (64, 128, 256, 512), (jnp.bfloat16, jnp.float32), block_sizes)


def _refuse_on_gpu(shape: AttentionShape) -> str | None:
    if shape.head_dim > 256:
        return (
            f"head_dim must be 64, 128 or 256, not {shape.head_dim}, whose tiles do not fit in shared memory. "
            "Plain XLA copies keys and values out of the pool before it multiplies, which moves three times their bytes"
        )
    if shape.group > 64:
        return f"a kv head can serve at most 64 query heads, not {shape.group}"
    return _refuse(shape, (64, 128, 256), (jnp.bfloat16,), (16, 32, 64, 128))


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None, split_pool_spec, lambda _shape, _architecture: XLA_TILES, 1, lambda _: None),
    "cpu": Implementation(
        _load_cpu,
        "cpu",
        cpu_pool_spec,
        _cpu_tiles,
        1,
        _refuse_on_cpu,
        _prepare_cpu,
        make_pool=make_cpu_pool,
        settle_pool=settle_cpu_pool,
        fuses_rope=lambda shape: shape.kv_dtype == shape.dtype,
    ),
    "tpu": Implementation(_load_tpu, "tpu", fused_pool_spec, _tpu_tiles, 16, _refuse_on_tpu),
    "gpu": Implementation(
        _load_gpu,
        "gpu",
        fused_pool_spec,
        _gpu_tiles,
        16,
        _refuse_on_gpu,
        device_refusal=hopper_refusal,
        fuses_rope=lambda _: True,
        takes_decodes_alone=True,
    ),
}

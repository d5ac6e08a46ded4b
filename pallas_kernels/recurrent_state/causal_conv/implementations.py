"""There are several ways of running the op; this says what each can do, and which one a platform gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import Implementation, cpu_implementation
from pallas_kernels.targets import hopper_refusal

from .shape import ConvShape


def _load_xla(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .xla import xla_causal_conv

    return xla_causal_conv


def _load_cpu() -> Callable[..., tuple[Array, Array]]:
    from .cpu import cpu_causal_conv

    return cpu_causal_conv


def _load_tpu(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .tpu import tpu_causal_conv

    return tpu_causal_conv


def _tpu_pool_spec(shape: ConvShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    from .tpu import tpu_pool_spec

    return tpu_pool_spec(shape, num_layers, num_slots)


def _refuse_on_tpu(shape: ConvShape) -> str | None:
    from .tpu import tpu_refuse

    return tpu_refuse(shape)


def _load_gpu(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .gpu import gpu_causal_conv

    return gpu_causal_conv


def _prepare_cpu(shape: ConvShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


def _pool_spec(shape: ConvShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_layers * num_slots, shape.kernel_size - 1, shape.num_channels), shape.dtype)


def _refuse_on_cpu(shape: ConvShape) -> str | None:
    return f"num_channels must be a multiple of 16, not {shape.num_channels}" if shape.num_channels % 16 else None


def _refuse_on_gpu(shape: ConvShape) -> str | None:
    if shape.num_channels % 128:
        return f"num_channels must be a multiple of 128, not {shape.num_channels}"
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype must be bfloat16 or float32, not {jnp.dtype(shape.dtype).name}"
    return None


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None, _pool_spec),
    "tpu": Implementation(_load_tpu, "tpu", _tpu_pool_spec, _refuse_on_tpu),
    "gpu": Implementation(_load_gpu, "gpu", _pool_spec, _refuse_on_gpu, device_refusal=hopper_refusal),
    "cpu": cpu_implementation(_load_cpu, _pool_spec, _refuse_on_cpu, _prepare_cpu),
}

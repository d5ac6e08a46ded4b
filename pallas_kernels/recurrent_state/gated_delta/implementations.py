"""There are several ways of running the op; this says what each can do, and which one a platform gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import Implementation, cpu_implementation
from pallas_kernels.targets import hopper_refusal

from .shape import GatedDeltaShape


def _load_xla(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .xla import xla_gated_delta

    return xla_gated_delta


def _load_cpu() -> Callable[..., tuple[Array, Array]]:
    from .cpu import cpu_gated_delta

    return cpu_gated_delta


def _load_tpu(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .tpu import tpu_gated_delta

    return tpu_gated_delta


def _load_gpu(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .gpu import gpu_gated_delta

    return gpu_gated_delta


def _prepare_cpu(shape: GatedDeltaShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


def _pool_spec(shape: GatedDeltaShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    size = (num_layers * num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim)
    return jax.ShapeDtypeStruct(size, jnp.float32)


def _cpu_pool_spec(shape: GatedDeltaShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    from pallas_kernels.recurrent_state.cpu.matrices import matrix_pool_spec

    return matrix_pool_spec(num_layers, num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim)


def _refuse_on_cpu(shape: GatedDeltaShape) -> str | None:
    if shape.key_dim % 16 or shape.value_dim % 16:
        return f"key_dim and value_dim must be multiples of 16, not {shape.key_dim} and {shape.value_dim}"
    return None


def _refuse_on_tpu(shape: GatedDeltaShape) -> str | None:
    if shape.key_dim % 128 or shape.value_dim % 128:
        return f"key_dim and value_dim must be multiples of 128, not {shape.key_dim} and {shape.value_dim}"
    from pallas_kernels.recurrent_state.tpu import refuse_state

    return refuse_state(shape.num_value_heads * shape.key_dim * shape.value_dim * 4, shape.dtype)


def _refuse_on_gpu(shape: GatedDeltaShape) -> str | None:
    from pallas_kernels.recurrent_state.gpu import refuse_state

    return refuse_state(shape.value_dim, shape.key_dim, ("value_dim", "key_dim"), shape.dtype)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None, _pool_spec),
    "tpu": Implementation(_load_tpu, "tpu", _pool_spec, _refuse_on_tpu),
    "gpu": Implementation(_load_gpu, "gpu", _pool_spec, _refuse_on_gpu, device_refusal=hopper_refusal),
    "cpu": cpu_implementation(_load_cpu, _cpu_pool_spec, _refuse_on_cpu, _prepare_cpu),
}

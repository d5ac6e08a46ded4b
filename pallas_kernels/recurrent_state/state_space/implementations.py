"""There are several ways of running the op; this says what each can do, and which one a platform gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.recurrent_state import Implementation, cpu_implementation
from pallas_kernels.targets import hopper_refusal

from .shape import StateSpaceShape


def _load_xla(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .xla import xla_state_space

    return xla_state_space


def _load_cpu() -> Callable[..., tuple[Array, Array]]:
    from .cpu import cpu_state_space

    return cpu_state_space


def _load_tpu(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .tpu import tpu_state_space

    return tpu_state_space


def _load_gpu(_: str | None) -> Callable[..., tuple[Array, Array]]:
    from .gpu import gpu_state_space

    return gpu_state_space


def _prepare_cpu(shape: StateSpaceShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


def _pool_spec(shape: StateSpaceShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    size = (num_layers * num_slots, shape.num_heads, shape.head_dim, shape.state_dim)
    return jax.ShapeDtypeStruct(size, jnp.float32)


def _cpu_pool_spec(shape: StateSpaceShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    from pallas_kernels.recurrent_state.cpu.matrices import matrix_pool_spec

    return matrix_pool_spec(num_layers, num_slots, shape.num_heads, shape.state_dim, shape.head_dim)


def _refuse_on_cpu(shape: StateSpaceShape) -> str | None:
    if shape.head_dim % 16 or shape.state_dim % 16:
        return f"head_dim and state_dim must be multiples of 16, not {shape.head_dim} and {shape.state_dim}"
    return None


def _refuse_on_tpu(shape: StateSpaceShape) -> str | None:
    if shape.head_dim % 8 or shape.state_dim % 128:
        return f"head_dim must be a multiple of 8 and state_dim of 128, not {shape.head_dim} and {shape.state_dim}"
    from pallas_kernels.recurrent_state.tpu import refuse_state

    return refuse_state(shape.num_heads * shape.head_dim * shape.state_dim * 4, shape.dtype)


def _refuse_on_gpu(shape: StateSpaceShape) -> str | None:
    from pallas_kernels.recurrent_state.gpu import refuse_state

    return refuse_state(shape.head_dim, shape.state_dim, ("head_dim", "state_dim"), shape.dtype)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None, _pool_spec),
    "tpu": Implementation(_load_tpu, "tpu", _pool_spec, _refuse_on_tpu),
    "gpu": Implementation(_load_gpu, "gpu", _pool_spec, _refuse_on_gpu, device_refusal=hopper_refusal),
    "cpu": cpu_implementation(_load_cpu, _cpu_pool_spec, _refuse_on_cpu, _prepare_cpu),
}

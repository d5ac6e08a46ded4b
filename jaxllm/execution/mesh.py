"""Spread a model over a mesh of devices: the part of each array that each device holds, and the models that fit.

There is always a mesh, of two axes; one device is a mesh of size 1. Experts are dealt out along the first axis, and
cut along the second; everything else is cut along both, as if they were one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.models.config import LayerSpec, ModelConfig
from jaxllm.models.params import EXPERT_AXIS, MESH_AXES, MODEL_AXIS, SHARDED, ArraySpec, ParamSpec, stored
from jaxllm.models.recurrence import StatePools
from pallas_kernels.weights import num_bytes

type Device = Any
"""A jax.Device, which type checkers cannot see."""

RULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(SHARDED, MESH_AXES),
    "experts": (EXPERT_AXIS,),
    "rows": (),
    "router": (),
    "embed": (),
    "latent": (),
    "positions": (),
    "pixels": (),
    "one": (),
    "types": (),
    "outputs": (),
    "layer_input": (),
    "head_dim": (),
    "features": (),
    "ids": (),
    "tap": (),
    "layers": (),
}
"""The mesh axes, if any, over which each logical axis of a parameter is spread."""
_TABLES = ("vocab", "positions", "types")
"""The first axis of matrices whose rows are looked up."""
LAID_OUT = ("tpu",)
"""The platforms where tables must be laid out by rows explicitly."""


def make_mesh(devices: Sequence[Device], num_expert_shards: int = 1) -> Mesh:
    """Return the mesh of devices, which may be a topology's; experts are dealt out among `num_expert_shards`."""
    return Mesh(np.array(devices).reshape(num_expert_shards, -1), MESH_AXES)


def deal_experts(mesh: Mesh, config: ModelConfig) -> Mesh:
    """Return the mesh for whole experts, with the most devices along the expert axis that divide the experts.

    Raises VLLMValidationError for a model without experts.
    """
    if all(layer.moe is None for layer in config.layers):
        message = f"enable_expert_parallel: {config.architecture} has no experts; leave it out."
        raise VLLMValidationError(message, parameter="enable_expert_parallel", value=True)
    if mesh.shape[EXPERT_AXIS] > 1:  # the user asked for it
        return mesh
    return make_mesh(mesh.devices.reshape(-1).tolist(), most_expert_shards(config, mesh.size))


def most_expert_shards(config: ModelConfig, num_devices: int) -> int:
    """Return the most devices among which the experts of all layers can be dealt out."""
    return gcd(num_devices, *(layer.moe.num_experts for layer in config.layers if layer.moe is not None))


def resolve_mesh(tensor_parallel_size: int, mesh: Mesh | None = None, devices: Sequence[Device] | None = None) -> Mesh:
    """Return the user's mesh, or one of the first of `devices`, by default JAX's.

    Raises VLLMValidationError for a mesh with other axes, and for more devices than there are.
    """
    if mesh is not None:
        return _own_mesh(mesh, tensor_parallel_size)
    devices = _by_host(jax.devices(), tensor_parallel_size) if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise VLLMValidationError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices, but there are {len(devices)} "
            f"({devices[0].device_kind}).",
            parameter="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    return make_mesh(devices[:tensor_parallel_size])


def _by_host(devices: Sequence[Device], count: int) -> Sequence[Device]:
    """Return `count` devices, the same number of each host. Raises VLLMValidationError if that does not divide."""
    num_hosts = jax.process_count()
    if num_hosts == 1:
        return devices
    if count % num_hosts:
        raise VLLMValidationError(
            f"tensor_parallel_size={count} cannot be spread over {num_hosts} hosts: give a multiple of nnodes.",
            parameter="tensor_parallel_size",
            value=count,
        )
    of_hosts = [[each for each in devices if each.process_index == host] for host in range(num_hosts)]
    return [device for each in of_hosts for device in each[: count // num_hosts]]


def _own_mesh(mesh: Mesh, tensor_parallel_size: int) -> Mesh:
    """Return a user's mesh with only the expert axis and the model axis, of type Auto."""
    others = {name: size for name, size in mesh.shape.items() if name not in MESH_AXES and size > 1}
    if MODEL_AXIS not in mesh.shape or others:
        raise VLLMValidationError(
            f"mesh must have an axis {MODEL_AXIS!r}, may have {EXPERT_AXIS!r}, and others of size 1 only, got "
            f"{dict(mesh.shape)}.",
            parameter="mesh",
            value=mesh,
        )
    if tensor_parallel_size not in (1, mesh.size):
        raise VLLMValidationError(
            f"tensor_parallel_size={tensor_parallel_size} contradicts mesh, of {mesh.size} devices; leave it out.",
            parameter="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    devices = mesh.devices
    if EXPERT_AXIS in mesh.shape:
        devices = np.moveaxis(devices, mesh.axis_names.index(EXPERT_AXIS), 0)
    return make_mesh(devices.reshape(-1).tolist(), mesh.shape.get(EXPERT_AXIS, 1))


def refusal(config: ModelConfig, num_devices: int, num_expert_shards: int = 1) -> str | None:
    """Return why a model cannot be spread over `num_devices` devices, or None if it can."""
    for layer in dict.fromkeys(config.layers):
        reason = None if layer.state is None else layer.state.shard_refusal(num_devices)
        if reason is not None:
            return reason
        if layer.attends and layer.num_heads % num_devices:
            return f"its {layer.num_heads} query heads do not divide"
        if layer.attends and layer.num_kv_heads % num_devices and num_devices % layer.num_kv_heads:
            return f"its {layer.num_kv_heads} kv heads neither divide nor are divided"
        widths = [(layer.intermediate_size, num_devices)] if layer.has_mlp else []
        if layer.moe is not None:
            widths = [(layer.moe.intermediate_size, num_devices // num_expert_shards)]
            widths += [(layer.moe.shared_size, num_devices)] if layer.moe.shared_size else []
        for width, count in widths:
            if width % count:
                return f"its MLP width of {width} does not divide"
    return None


def spread(config: ModelConfig, num_devices: int, num_expert_shards: int = 1) -> ModelConfig:
    """Return a checkpoint's model as it runs on `num_devices` devices; fewer kv heads than devices are repeated.

    Experts are dealt out among `num_expert_shards` of them, and each is cut among the devices that have it. Raises
    VLLMValidationError for a model whose sizes do not divide, with the numbers of devices that would do.
    """
    for layer in config.layers:
        if layer.moe is not None and layer.moe.num_experts % num_expert_shards:
            message = f"{layer.moe.num_experts} experts are not to be dealt out among the {num_expert_shards} devices"
            message += f" of the mesh's axis {EXPERT_AXIS!r}: give one that divides them."
            raise VLLMValidationError(message, parameter="mesh", value=num_expert_shards)

    def reason_for(count: int) -> str | None:
        return refusal(config, count, gcd(count, num_expert_shards))

    reason = reason_for(num_devices)
    if reason is not None:
        most = max(num_devices, *(layer.num_heads for layer in config.layers))
        sizes = [str(count) for count in range(1, most + 1) if reason_for(count) is None]
        raise VLLMValidationError(
            f"tensor_parallel_size={num_devices}: this model cannot be spread over {num_devices} devices: {reason}. "
            f"It runs on {', '.join(sizes)}.",
            parameter="tensor_parallel_size",
            value=num_devices,
        )
    layers = tuple(_repeated(layer, max(1, num_devices // layer.num_kv_heads)) for layer in config.layers)
    return replace(config, num_shards=num_devices, num_expert_shards=num_expert_shards, layers=layers)


def _repeated(layer: LayerSpec, times: int) -> LayerSpec:
    """Return a layer with each kv head repeated `times` times; latents are the same on all devices."""
    if layer.latent is not None or not layer.attends:
        return layer
    return replace(layer, num_kv_heads=layer.num_kv_heads * times, kv_repeats=times)


def param_sharding(mesh: Mesh, spec: ParamSpec | ArraySpec) -> NamedSharding:
    """Return the sharding of a parameter; an axis that does not divide is whole on every device."""
    within = (MODEL_AXIS,) if spec.num_experts is not None else MESH_AXES

    def part(axis: str | None, size: int) -> tuple[str, ...] | None:
        names = () if axis is None else RULES[axis]
        names = within if names == MESH_AXES else names
        return names if names and size % prod(mesh.shape[name] for name in names) == 0 else None

    return NamedSharding(mesh, PartitionSpec(*map(part, spec.axes, spec.shape)))


def param_format(mesh: Mesh, spec: ParamSpec | ArraySpec) -> NamedSharding | Format:
    """Return the sharding of a parameter, and for a table on TPUs its layout.

    A TPU lays a table out by columns if its rows are no multiple of 128, and would copy it in each step for look-ups.
    """
    sharding = param_sharding(mesh, spec)
    is_table = len(spec.shape) == 2 and spec.axes[0] in _TABLES
    if not is_table or mesh.devices.flat[0].platform not in LAID_OUT:
        return sharding
    return Format(Layout(major_to_minor=(0, 1)), sharding)


def pool_spec(*, is_cut: bool) -> PartitionSpec:
    """Return the spec of a KV pool's sharding: over its kv heads, axis 1, or none for a pool of latents."""
    return PartitionSpec(None, MESH_AXES) if is_cut else PartitionSpec()


def state_pool_specs(pools: StatePools) -> StatePools:
    """Return the specs of recurrent states' shardings: convolutions' over channels, others' over heads."""
    heads = PartitionSpec(None, MESH_AXES)
    return StatePools(PartitionSpec(None, None, MESH_AXES), None if pools.scan is None else heads)


def whole_spec(mesh: Mesh, local: jax.ShapeDtypeStruct, cut: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array; each device has a part of the shape of `local`."""
    axes = [*cut, *[None] * (len(local.shape) - len(cut))]
    shape = tuple(size * (1 if axis is None else mesh.size) for size, axis in zip(local.shape, axes, strict=True))
    return jax.ShapeDtypeStruct(shape, local.dtype, sharding=NamedSharding(mesh, cut))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def place_replicated(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """Place an array whole on every device; all hosts of the mesh pass the same one."""
    return jax.make_array_from_callback(array.shape, replicated(mesh), lambda index: array[index])


def param_bytes(mesh: Mesh, specs: Mapping[str, ParamSpec]) -> int:
    """Return the bytes of parameters that one device holds."""
    return sum(
        num_bytes(prod(param_sharding(mesh, array).shard_shape(array.shape)), array.dtype)
        for spec in specs.values()
        for array in jax.tree.leaves(stored(spec))
    )


def replicated_params(mesh: Mesh, specs: Mapping[str, ParamSpec]) -> list[str]:
    """Return the paths of the parameters that every device holds whole."""
    return [path for path, spec in specs.items() if param_sharding(mesh, spec).is_fully_replicated]

"""The arrays that hold a model's weights, their names, and the checkpoint's tensors that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Format
from jax.sharding import Mesh

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.mesh import param_format, replicated
from jaxllm.execution.weights.conversion import Conversions
from jaxllm.loading.load import placements
from jaxllm.models.params import ArraySpec, Joined, ParamSpec, array_specs, stored, unflatten


@dataclass(frozen=True)
class Leaf:
    """An array on the devices: all of a model's array at `path`, or a part of its stored form."""

    path: str
    spec: ArraySpec
    where: jax.sharding.Sharding | Format


class WeightTarget:
    """What new weights of a model must be like. It holds no arrays."""

    def __init__(self, specs: Mapping[str, ParamSpec], mesh: Mesh) -> None:
        self.arrays, self.mesh = array_specs(specs), mesh
        self.where = {path: placements(array, param_format(mesh, array)) for path, array in self.arrays.items()}
        self.specs = {source: spec for spec in specs.values() for source in spec.sources}
        """A parameter of each tensor, by its HF name."""
        self.owners: dict[str, list[str]] = {}
        """The arrays that a tensor is a part of, by its HF name."""
        for path, array in self.arrays.items():
            for source in sources_of_array(array):
                self.owners.setdefault(source, []).append(path)
        self.leaves: dict[str, Leaf] = named_leaves(
            unflatten(
                {
                    path: jax.tree.map(_leaf_of(path), stored(array), self.where[path])
                    for path, array in self.arrays.items()
                }
            )
        )
        """The arrays on the devices, by their names in the pytree of the weights."""
        self.conversions = Conversions()
        self.is_rounding_noted = False
        """Whether the log says that matrices are rounded."""

    def flat(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays, or their stored forms, of a pytree of weights, by path."""
        return {path: _find(weights, path) for path in self.arrays}

    def bring(self, array: Any) -> Array:
        """Return one of HF's tensors on the devices of the mesh; one that is there stays as it is."""
        return self._moved(array, replicated(self.mesh))

    def adopt(self, leaf: Leaf, array: Any) -> tuple[Array, bool]:
        """Return an array as the devices hold it, and whether it has the memory of the one passed."""
        dtype = jnp.dtype(leaf.spec.dtype)
        if isinstance(array, jax.Array) and array.dtype == dtype and _lies(array, leaf.where):
            return _of_sharding(array, _sharding(leaf.where)), True
        if array.dtype == dtype or not isinstance(array, jax.Array):
            return jax.device_put(array if isinstance(array, jax.Array) else _copied(array, dtype), leaf.where), False
        return self.conversions.cast(self._moved(array, _sharding(leaf.where)), dtype, leaf.where), False

    def _moved(self, array: Any, where: jax.sharding.Sharding) -> Array:
        """Return an array on the devices of the mesh, placed as `where` says unless it is there already.

        Equivalent shardings become one, so that programs are not compiled again for another.
        """
        if not isinstance(array, jax.Array):
            return jax.device_put(_copied(array, array.dtype), where)
        if array.sharding.is_equivalent_to(where, array.ndim):
            return _of_sharding(array, where)
        devices = set(self.mesh.devices.flat)
        return array if array.sharding.device_set == devices else jax.device_put(array, where)


def sources_of_array(array: ArraySpec) -> list[str]:
    """Return the HF names of the tensors that an array is made of."""
    return list(dict.fromkeys(source for spec in array.params.values() for source in spec.sources))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by names such as "layers.0.attn.qkv"; None is no leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Leaf))
    return {".".join(map(_key_name, path)): leaf for path, leaf in leaves}


def check_alive(name: str, array: Any) -> None:
    """Raise VLLMValidationError for an array that has been deleted or donated."""
    if isinstance(array, jax.Array) and array.is_deleted():
        message = f"the array of {name!r} was deleted, or donated to a program, before the update: keep it until then."
        raise VLLMValidationError(message, parameter="weights", value=name)


def _leaf_of(path: str) -> Any:
    return lambda spec, where: Leaf(path, spec, where)


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _find(weights: Any, path: str) -> Any:
    """Return the value that `unflatten` has put into the tree for a path."""
    base, _, number = path.partition("#")
    node = weights
    for name in base.split("."):
        node = node[int(name) if isinstance(node, tuple) else name]
    return node.members[int(number)] if isinstance(node, Joined) else node


def _sharding(where: jax.sharding.Sharding | Format) -> jax.sharding.Sharding:
    sharding = where.sharding if isinstance(where, Format) else where
    assert sharding is not None
    return sharding


def _lies(array: Array, where: jax.sharding.Sharding | Format) -> bool:
    """Return whether an array is placed as `where` says."""
    if not array.sharding.is_equivalent_to(_sharding(where), array.ndim):
        return False
    order = where.layout.major_to_minor if isinstance(where, Format) else tuple(range(array.ndim))  # type: ignore[union-attr]
    return tuple(array.format.layout.major_to_minor) == tuple(order)  # pyright: ignore[reportAttributeAccessIssue]


def _of_sharding(array: Array, sharding: jax.sharding.Sharding) -> Array:
    """Return an array of the same memory with the sharding of the programs' inputs, which is an equivalent one."""
    pieces = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def _copied(array: Any, dtype: Any) -> np.ndarray:
    """Return a copy of a host array, whose owner may change it; float64 is what programs here do not take."""
    return np.array(array, np.float32 if dtype == np.float64 else dtype)

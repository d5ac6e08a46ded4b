"""Replace weights on two virtual devices, for test_weight_update.py: a process of its own, JAX counts devices once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.e2e.test_sleep import SETTINGS
from tests.e2e.test_weight_update import answers, changed, expected_of, saved
from tests.e2e.tiny_engine import tiny_llm


def split(array: Array) -> Array:
    """Return an array on a trainer's mesh, split along its first axis of even length."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    axis = next((axis for axis, size in enumerate(array.shape) if size % 2 == 0), None)
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "fsdp")
    return jax.device_put(array, NamedSharding(mesh, spec))


def pointers(weights: Any) -> list[list[int]]:
    """Return the addresses of the arrays' parts on the devices."""
    arrays = jax.tree.leaves(weights)
    return [[shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards] for array in arrays]


def check(case: str, directory: Path) -> None:
    """Compare three updates with new engines: of tensors in several placements, and of trees."""
    updates = [changed(case, seed) for seed in range(3)]
    paths = [saved(case, tensors, directory / f"{case}{i}") for i, tensors in enumerate(updates)]
    expected = [expected_of(path, tensor_parallel_size=2) for path in paths]
    assert expected[0] != expected[1] != expected[2]
    with tiny_llm(case, **SETTINGS, tensor_parallel_size=2) as (llm, _):
        llm.update_weights(updates[0])
        assert answers(llm) == expected[0]
        weights = llm.get_weights()
        llm.update_weights({name: split(jnp.asarray(tensor)) for name, tensor in updates[1].items()})
        assert answers(llm) == expected[1]
        last = jax.devices()[1]
        llm.update_weights({name: jax.device_put(tensor, last) for name, tensor in updates[2].items()})
        assert answers(llm) == expected[2]
        llm.update_weights(jax.tree.map(split, weights))
        assert answers(llm) == expected[0]
        llm.update_weights(weights)
        assert answers(llm) == expected[0]
        assert pointers(llm.get_weights()) == pointers(weights)


if __name__ == "__main__":
    assert len(jax.devices()) == 2
    with tempfile.TemporaryDirectory() as name:
        for case in ("llama3_tied", "qwen3_next"):
            check(case, Path(name))

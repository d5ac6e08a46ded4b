"""Recurrent states are spread over devices: each has the channels and heads that its own share of the weights makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxllm.execution.mesh import state_pool_specs
from jaxllm.models.layers.recurrent import StateInputs
from jaxllm.models.params import MESH_AXES
from jaxllm.models.recurrence import StateOps, StatePools
from pallas_kernels.recurrent_state import StateBatch


@dataclass(frozen=True)
class ShardedRecurrence:
    """The ops of a group of layers with recurrent state, of which `ops` take one device's share."""

    ops: StateOps
    mesh: Mesh

    def __call__(
        self, inputs: StateInputs, pools: StatePools, batch: StateBatch, *, layer: Array | int, **settings: Any
    ) -> tuple[Array, StatePools]:
        """Do as `StateOps.run` does, on every device with its share of inputs and pools; outputs share axis 1."""

        def run(inputs: StateInputs, pools: StatePools, batch: StateBatch, layer: Array | int) -> Any:
            return self.ops.run(inputs, pools, batch, layer=layer, **settings)

        def spec_of(axis: int | None) -> PartitionSpec:
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MESH_AXES)

        # None stands for an input that a layer lacks.
        each, make = zip(inputs, inputs.sharded_axes, strict=True), cast(Any, type(inputs))
        shares = make(*(None if x is None else spec_of(axis) for x, axis in each))
        places = state_pool_specs(pools)
        sharded = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(shares, places, PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(None, MESH_AXES), places),
            check_vma=False,
        )
        return sharded(inputs, pools, batch, layer)

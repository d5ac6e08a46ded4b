"""The kernels that a model computes with, besides attention."""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import Mesh

from pallas_kernels.grouped_matmul import GroupedMatmul
from pallas_kernels.linear import Linear
from pallas_kernels.lora import Lora


class Ops(NamedTuple):
    """The kernels that layers compute with, besides attention."""

    linear: Linear = Linear()
    grouped_matmul: GroupedMatmul = GroupedMatmul()
    """The op of one device, for the weights of experts."""
    mesh: Mesh | None = None
    """The devices that experts and quantized weights are spread over; None for one device."""
    by_head: GroupedMatmul = GroupedMatmul()
    """The op for weights that each head has its own of; plain XLA's is one matmul with a batch of heads."""
    lora: Lora = Lora()
    """The op for adapters beside weights."""

    @property
    def has_cpu_norms(self) -> bool:
        """Say whether norms are the CPU's own kernels, as matmuls are."""
        return self.linear.platform == "cpu"

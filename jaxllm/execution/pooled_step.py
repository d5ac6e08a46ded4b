"""The step of a pooling model is one pure function from parameters, pool and packed inputs to outputs; it has no
sampler. Everything in it is traced."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array
from jax.sharding import Mesh

from jaxllm.models.model import Model
from pallas_kernels.paged_attention import KVPool, PoolAttention

from .packing import BatchShape, unpack
from .sharded_attention import shard


class PoolShape(NamedTuple):
    """The shape that the program of a step that pools is compiled for."""

    batch: BatchShape
    by_token: bool
    """True if each token gives an output, and not each sequence."""


def run_pooled_step(
    params: Any,
    kv_pools: tuple[KVPool, ...],
    ints: Array,
    floats: Array,
    *,
    model: Model,
    shape: PoolShape,
    attention: tuple[PoolAttention, ...],
    mesh: Mesh,
) -> tuple[tuple[KVPool, ...], Array]:
    """Run one step; return the KV pools, and float32 outputs [s, o] or, by token, [t, o]."""
    inputs = unpack(ints, floats, shape.batch)
    batches = inputs.batches(decodes_only=False)
    attend = [shard(each, mesh) for each in attention]
    hidden_td, kv_pools = model.forward(params, kv_pools, inputs.tokens, batches, attention=attend)
    if shape.by_token:
        return kv_pools, model.pool_tokens(params, hidden_td)
    return kv_pools, model.pool(params, hidden_td, batches[0])

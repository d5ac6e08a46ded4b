"""The step of a pooling model is one pure function from parameters, pool and packed inputs to outputs; it has no
sampler. Everything in it is traced."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from jaxllm.execution.caches import Caches, Pools
from jaxllm.execution.packing import BatchShape, unpack
from jaxllm.models.model import Model


class PoolShape(NamedTuple):
    """The shape that the program of a step that pools is compiled for."""

    batch: BatchShape
    by_token: bool
    """True if each token gives an output, and not each sequence."""


def run_pooled_step(
    params: Any,
    pools: Pools,
    ints: Array,
    floats: Array,
    *,
    model: Model,
    shape: PoolShape,
    caches: Caches,
) -> tuple[Pools, Array]:
    """Run one step; return the KV pools, and float32 outputs [s, o] or, by token, [t, o]."""
    inputs = unpack(ints, floats, shape.batch)
    arguments = caches.arguments(inputs, decodes_only=False)
    hidden_td, pools, _ = model.forward(params, pools, inputs.tokens, **arguments)
    if shape.by_token:
        return pools, model.pool_tokens(params, hidden_td)
    return pools, model.pool(params, hidden_td, inputs.placements[0].batch(inputs.sequences))

"""The trials of the kernels that an engine's steps would use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import jax.numpy as jnp

from jaxllm.models.loop import LayerLoop
from jaxllm.models.shapes import grouped_shapes, linear_shapes, segment_shapes
from jaxllm.models.specs import ModelSpecs
from jaxllm.models.weights import Ops
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.model import make_model
from pallas_kernels.indexer import Indexer
from pallas_kernels.latent_attention import LatentAttention
from pallas_kernels.paged_attention import PagedAttention
from pallas_kernels.trials.attention import paged_trials
from pallas_kernels.trials.indexer import indexer_trials
from pallas_kernels.trials.latents import latent_trials
from pallas_kernels.trials.matmuls import grouped_trials, linear_trials
from pallas_kernels.trials.segments import segment_trials
from pallas_kernels.trials.states import state_trials
from pallas_kernels.trials.trial import Trial


def engine_trials(config: EngineConfig) -> list[Trial]:
    """Return the trials of all ops that do not run in plain XLA, the draft model's too, in an order that is fixed."""
    configs = [config] if config.draft is None else [config, config.draft]
    trials = chain.from_iterable(map(_model_trials, configs))
    return list({trial[:4]: trial for trial in trials}.values())


def _model_trials(config: EngineConfig) -> Iterator[Trial]:
    yield from _attention_trials(config)
    for group in config.state_groups:
        for op in (group.ops.conv, group.ops.scan):
            if op is not None and op.implementation != "xla":
                yield from state_trials(op)
    model = make_model(config)
    yield from _matmul_trials(model.specs, model.ops)
    for tower in model.encoders:
        yield from _matmul_trials(tower.specs, tower.ops)
        if not tower.attention.implementation.startswith("xla"):
            for shape in segment_shapes(tower.specs):
                yield from segment_trials(tower.attention, shape)


def _attention_trials(config: EngineConfig) -> Iterator[Trial]:
    layers = config.model_config.layers
    soft_cap = next((layer.soft_cap for layer in layers if layer.soft_cap), None)
    has_sinks = any(layer.sinks for layer in layers)
    for group in (*config.kv_groups, *config.cross_groups):
        op = group.attention
        if op.implementation == "xla":
            continue
        if isinstance(op, LatentAttention):
            yield from latent_trials(op)
        elif isinstance(op, Indexer):
            yield from indexer_trials(op)
        elif isinstance(op, PagedAttention):
            yield from paged_trials(op, window=group.window, soft_cap=soft_cap, has_sinks=has_sinks)


def _matmul_trials(specs: ModelSpecs, ops: Ops) -> Iterator[Trial]:
    is_packed = specs.loop is LayerLoop.IN_PLACE
    if ops.linear.platform is not None:
        for shape in linear_shapes(specs):
            # Results of float32 differ in the last instruction.
            if jnp.dtype(shape.out_dtype) == jnp.dtype(specs.dtype) and ops.linear.refusal(shape) is None:
                yield from linear_trials(ops.linear, shape, is_packed=is_packed)
    if ops.grouped_matmul.platform is not None:
        for shape in grouped_shapes(specs):
            yield from grouped_trials(ops.grouped_matmul, shape, is_packed=is_packed)

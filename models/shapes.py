"""The shapes of a model's matmuls on one device, for which kernels are chosen."""

from __future__ import annotations

from math import prod

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import MatmulShape
from pallas_kernels.linear import ACTIVATIONS as FUSED_ACTIVATIONS
from pallas_kernels.linear import LinearShape
from pallas_kernels.segment_attention import SegmentShape

from .layers.latent_attention import head_matmuls
from .layers.moe import matmul_shapes
from .params import Cut, array_specs, cut_of
from .specs import ModelSpecs, declared


def linear_shapes(specs: ModelSpecs) -> list[LinearShape]:
    """Return one device's matmuls except those of experts; sizes are those of the last axes as they are held.

    If a model is spread over devices, the shapes of quantized weights are those of one device's share.
    """
    shapes: dict[LinearShape, None] = {}
    for path, array in array_specs(specs.param_specs()).items():
        if not array.num_inputs or array.num_experts is not None:
            continue
        count = array.num_inputs
        rows, num_inputs = prod(array.shape[array.stacked : -count]), prod(array.shape[-count:])
        num_shards = specs.config.num_shards if array.format else 1
        cut = cut_of(array.axes, array.shape, count, num_shards)
        rows //= num_shards if cut is Cut.OUTPUTS else 1
        num_inputs //= num_shards if cut is Cut.INPUTS else 1
        shape = LinearShape(rows, num_inputs, specs.dtype, specs.dtype, array.format)
        for activation, is_gated in _activations(specs):
            if activation in FUSED_ACTIVATIONS and path.endswith("mlp.gate_up" if is_gated else "mlp.up"):
                shapes[shape._replace(activation=activation, is_gated=is_gated)] = None
        shapes[shape] = None
        shapes[shape._replace(out_dtype=jnp.dtype(jnp.float32))] = None
    return list(shapes)


def segment_shapes(specs: ModelSpecs) -> list[SegmentShape]:
    """Return the heads of a tower's layers, those with a window aside, which attend in plain XLA."""
    heads = dict.fromkeys((kind.num_heads, kind.head_dim) for kind in specs.plan.kinds if kind.window is None)
    return [SegmentShape(*each, jnp.dtype(specs.dtype)) for each in heads]


def _activations(specs: ModelSpecs) -> tuple[tuple[str, bool], ...]:
    """Return the activations of dense layers, and for each whether it is a gate's."""
    names = (declared(state) for _, state in specs.kinds)
    layers = zip(specs.plan.kinds, names, strict=True)
    return tuple(dict.fromkeys((kind.hidden_act, "mlp.gate" in names) for kind, names in layers if "mlp.up" in names))


def grouped_shapes(specs: ModelSpecs) -> list[MatmulShape]:
    """Return one device's matmuls by the weights of experts."""
    if not any(kind.moe for kind in specs.plan.kinds):
        return []
    arrays = array_specs(specs.param_specs())
    shapes: dict[MatmulShape, None] = {}
    for number, (kind, layers) in enumerate(zip(specs.plan.kinds, specs.plan.layers_of, strict=True)):
        if kind.moe is not None:
            index = number if specs.loop.stacked else layers[0]
            in_layer = {path: array for path, array in arrays.items() if path.startswith(f"layers.{index}.")}
            gate_up, down = (
                next(array for path, array in in_layer.items() if path.endswith(f"experts.{name}"))
                for name in ("gate_up", "down")
            )
            formats = gate_up.format, down.format
            shapes |= dict.fromkeys(matmul_shapes(kind, specs.config, specs.dtype, formats))
    return list(shapes)


def head_shapes(specs: ModelSpecs) -> list[MatmulShape]:
    """Return one device's matmuls by weights with a matrix for each head."""
    shapes = (shape for kind in specs.plan.kinds for shape in head_matmuls(kind, specs.config, specs.dtype))
    return list(dict.fromkeys(shapes))

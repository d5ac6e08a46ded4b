"""The MLP of a dense layer, with a gate or without."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from .linear import ACTIVATIONS, gated_linear, linear
from .params import Part, declare, declare_merged, split


def gate_by(act: Callable[[Array], Array], gate: Array, up: Array, limit: float | None) -> Array:
    """Return act(gate) * up; the former is at most `limit`, and ups are within it on both sides, unless it is None."""
    if limit is None:
        return act(gate) * up
    return jnp.minimum(act(gate), limit) * jnp.clip(up, -limit, limit)


class GatedMLP(nnx.Module):
    """The MLP down(act(gate(x)) * up(x))."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f = cfg.hidden_size, spec.intermediate_size
        self.parts = (Part("gate", "mlp", f), Part("up", "mlp", f))
        self.gate_up = declare_merged(self.parts, (d,), ("embed",), cfg.num_shards, dtype, 1)
        self.down = declare((d, f), ("embed", "mlp"), dtype, 1)
        self.act, self.limit, self.biases_gates = spec.hidden_act, spec.mlp_limit, spec.mlp_bias and spec.gate_bias
        if self.biases_gates:
            biases = [part._replace(name=f"{part.name}_bias") for part in self.parts]
            self.gate_up_bias = declare_merged(biases, (), (), cfg.num_shards, dtype)
        self.down_bias = declare((d,), ("embed",), dtype) if spec.mlp_bias else None

    def __call__(self, x_td: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        if not self.biases_gates and self.limit is None:
            gated_tf = gated_linear(x_td, self.gate_up, self.parts, self.act)
            return linear(gated_tf, self.down, plus=plus_td, bias=self.down_bias)
        both = linear(x_td, self.gate_up)
        gate_tf, up_tf = split(both + self.gate_up_bias[...][None] if self.biases_gates else both, self.parts)
        gated_tf = gate_by(ACTIVATIONS[self.act], gate_tf, up_tf, self.limit)
        return linear(gated_tf, self.down, plus=plus_td, bias=self.down_bias)


class PlainMLP(nnx.Module):
    """The MLP down(act(up(x)))."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f = cfg.hidden_size, spec.intermediate_size
        self.up = declare((f, d), ("mlp", "embed"), dtype, 1)
        self.down = declare((d, f), ("embed", "mlp"), dtype, 1)
        self.act = spec.hidden_act
        self.up_bias = declare((f,), ("mlp",), dtype) if spec.mlp_bias else None
        self.down_bias = declare((d,), ("embed",), dtype) if spec.mlp_bias else None

    def __call__(self, x_td: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        up_tf = linear(x_td, self.up, bias=self.up_bias, act=self.act)
        return linear(up_tf, self.down, plus=plus_td, bias=self.down_bias)

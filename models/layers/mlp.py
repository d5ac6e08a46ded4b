"""The MLP of a dense layer, with a gate or without."""

from __future__ import annotations

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from .linear import ACTIVATIONS, gated_linear, linear
from .params import Part, declare, declare_merged, split


class GatedMLP(nnx.Module):
    """The MLP down(act(gate(x)) * up(x))."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f = cfg.hidden_size, spec.intermediate_size
        self.parts = (Part("gate", "mlp", f), Part("up", "mlp", f))
        self.gate_up = declare_merged(self.parts, (d,), ("embed",), cfg.num_shards, dtype, 1)
        self.down = declare((d, f), ("embed", "mlp"), dtype, 1)
        self.act, self.has_bias = spec.hidden_act, spec.mlp_bias
        if spec.mlp_bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in self.parts]
            self.gate_up_bias = declare_merged(biases, (), (), cfg.num_shards, dtype)
            self.down_bias = declare((d,), ("embed",), dtype)

    def __call__(self, x_td: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        if not self.has_bias:
            return linear(gated_linear(x_td, self.gate_up, self.parts, self.act), self.down, plus=plus_td)
        gate_tf, up_tf = split(linear(x_td, self.gate_up) + self.gate_up_bias[...][None], self.parts)
        return linear(ACTIVATIONS[self.act](gate_tf) * up_tf, self.down, plus=plus_td) + self.down_bias[...][None]


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

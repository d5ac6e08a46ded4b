"""The MLP of layers without gates."""

from __future__ import annotations

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from .linear import biased_linear, linear
from .params import declare


class PlainMLP(nnx.Module):
    """The MLP down(act(up(x)))."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f = cfg.hidden_size, spec.intermediate_size
        self.up = declare((f, d), ("mlp", "embed"), dtype, 1)
        self.down = declare((d, f), ("embed", "mlp"), dtype, 1)
        self.act, self.has_bias = spec.hidden_act, spec.mlp_bias
        if spec.mlp_bias:
            self.up_bias, self.down_bias = declare((f,), ("mlp",), dtype), declare((d,), ("embed",), dtype)

    def __call__(self, x_td: Array, plus_td: Array) -> Array:
        """Return [t, d], added to `plus_td`."""
        up_tf = biased_linear(x_td, self.up, self.up_bias if self.has_bias else None, self.act)
        out_td = linear(up_tf, self.down, plus=plus_td)
        return out_td + self.down_bias[...][None] if self.has_bias else out_td

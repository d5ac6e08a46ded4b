"""The MLP of layers without gates."""

from __future__ import annotations

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from .linear import linear
from .params import declare


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

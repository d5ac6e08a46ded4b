"""A short causal convolution of each channel separately: Mamba-2's, Qwen3-Next's and Qwen3.5's, and LFM2's.

A state is a sequence's last inputs. `reference.py` defines what is correct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jax import Array

from pallas_kernels.implementations import CAUSAL_CONV
from pallas_kernels.pool_op import pick_pool_op
from pallas_kernels.recurrent_state import StateBatch, StateOp

from .shape import ConvShape

__all__ = ["CausalConv", "ConvShape", "pick"]


@dataclass(frozen=True)
class CausalConv(StateOp):
    """The op for one shape in one implementation; make it with `pick`."""

    name = "the causal convolution"
    implementations = CAUSAL_CONV

    shape: ConvShape

    def __call__(
        self,
        x_tc: Array,
        weight_kc: Array,
        pool: Array,
        batch: StateBatch,
        *,
        layer: Array | int,
        num_layers: int,
        bias_c: Array | None = None,
        activation: Literal["silu"] | None = None,
    ) -> tuple[Array, Array]:
        """Sum up each row's input and the `kernel_size - 1` before it, and keep the last of them in `layer`.

        Args:
          x_tc: inputs of all tokens of the step.
          weight_kc: the factors of the inputs, in x's dtype; the last is for a row's own input.
          pool: the pool of all layers, of `pool_spec`; donate it, the result takes its place.
          batch: the rows and states of the step.
          layer: index of the layer, may be traced.
          num_layers: layers in the pool.
          bias_c: the number that the sum begins with, in x's dtype.
          activation: the function that is applied to the sum, in float32.

        Returns:
          The sums [t, c] in x's dtype (rows of padding are 0), and the pool.

        Raises:
          ValueError: for arrays that are not of this shape and dtype, and an unknown activation.
        """
        shape = self.shape
        sizes: dict[str, tuple[Array, tuple[int, ...], Any]] = {
            "x": (x_tc, (len(x_tc), shape.num_channels), shape.dtype),
            "weight": (weight_kc, (shape.kernel_size, shape.num_channels), shape.dtype),
        }
        if bias_c is not None:
            sizes["bias"] = bias_c, (shape.num_channels,), shape.dtype
        self._check(pool, num_layers, **sizes)
        if activation not in (None, "silu"):
            raise ValueError(f"{self.name}: there is no activation {activation!r}, only silu")
        settings = {"bias_c": bias_c, "activation": activation}
        return self._run(x_tc, weight_kc, pool, batch, layer=layer, num_layers=num_layers, **settings)


def pick(
    shape: ConvShape, platform: str, name: str | None = None, *, architecture: str | None = None
) -> tuple[CausalConv, str | None]:
    """Return the op for a platform, and why it is not the platform's own kernel; see `paged_attention.pick`."""
    return pick_pool_op(CausalConv, shape, platform, name, architecture)

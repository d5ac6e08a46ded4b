"""A matmul whose inputs and outputs are clipped to bounds in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import Array

from ..names import TensorName
from .linear import linear
from .params import declare

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""The names of the bounds, in the checkpoint too."""


class ClippedLinear(nnx.Module):
    """A matmul by `weight`, with bounds if it `clips`."""

    def __init__(self, weight: nnx.Param[Array], *, clips: bool = True) -> None:
        self.weight, self.clips = weight, clips
        for name in _BOUNDS if clips else ():
            setattr(self, name, declare((), (), jnp.float32))

    def __call__(self, x_ti: Array) -> Array:
        """Return [t, *out] of [t, *in]."""
        if not self.clips:
            return linear(x_ti, self.weight)
        lower, upper, lower_out, upper_out = (getattr(self, name)[...].astype(x_ti.dtype) for name in _BOUNDS)
        return jnp.clip(linear(jnp.clip(x_ti, lower, upper), self.weight), lower_out, upper_out)


def bound_names(layer: str, matmuls: Mapping[str, tuple[str, str]]) -> dict[str, TensorName]:
    """Return the names of the bounds of matmuls, each by our name with HF's and the layout of its weight."""
    pairs = [(path, name, bound) for path, (name, _) in matmuls.items() for bound in _BOUNDS]
    return {f"{path}.{bound}": TensorName(f"{layer}{name}{bound}", "->") for path, name, bound in pairs}

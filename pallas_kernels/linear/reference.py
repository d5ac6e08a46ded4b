"""The reference: a product in float64, slow, which defines what is correct."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def reference_linear(
    x_ti: np.ndarray,
    w_oi: np.ndarray,
    *,
    activation: str | None = None,
    is_gated: bool = True,
    plus_to: np.ndarray | None = None,
    bias_o: np.ndarray | None = None,
) -> np.ndarray:
    """See `Linear`; takes one layer's numbers, widened, and returns float64."""
    out_to = np.asarray(x_ti, np.float64) @ np.asarray(w_oi, np.float64).T
    for added in (plus_to, bias_o):
        if added is not None:
            out_to = out_to + np.asarray(added, np.float64)
    if activation is None:
        return out_to
    if not is_gated:
        return ACTIVATIONS[activation](out_to)
    gate, gated = np.split(out_to, 2, axis=1)
    return ACTIVATIONS[activation](gate) * gated

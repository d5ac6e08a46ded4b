"""Activations of vectors of float32, by HF's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels.native.emitter import Emitter

GELU = math.sqrt(2 / math.pi)
_ERFC_SCALE = 0.3275911
_ERFC_COEFFICIENTS = tuple(0.5 * c for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))
"""Half of erfc(x) is exp(-x * x) times a polynomial of t = 1 / (1 + scale * x). These are its coefficients, the highest
first."""


def _silu(e: Emitter, x: Any) -> Any:
    return _times_logistic(e, x, x)


def _gelu_tanh(e: Emitter, x: Any) -> Any:
    """(1 + tanh(a)) / 2 is the logistic function of 2 a."""
    square = e.ir.fmul(x, x)
    factor = e.fma(square, e.constant(2 * GELU * 0.044715, x), e.constant(2 * GELU, x))
    return _times_logistic(e, x, e.ir.fmul(x, factor))


def _gelu(e: Emitter, x: Any) -> Any:
    """Return x times the normal distribution of x.

    Its tail is half of erfc(|x| / sqrt(2)): formula 7.1.26 of Abramowitz and Stegun, within 1.5e-7.
    """
    size = e.larger(x, e.ir.fneg(x))
    t = e.ir.fdiv(e.constant(1.0, x), e.fma(size, e.constant(_ERFC_SCALE * math.sqrt(0.5), x), e.constant(1.0, x)))
    series = e.constant(_ERFC_COEFFICIENTS[0], x)
    for coefficient in _ERFC_COEFFICIENTS[1:]:
        series = e.fma(series, t, e.constant(coefficient, x))
    halved = e.ir.fmul(e.ir.fmul(x, x), e.constant(-0.5, x))
    tail = e.ir.fmul(e.ir.fmul(series, t), e.exp(halved))
    is_above = e.ir.fcmp_ordered(">", x, e.constant(0.0, x))
    return e.ir.fmul(x, e.ir.select(is_above, e.ir.fsub(e.constant(1.0, x), tail), tail))


def _times_logistic(e: Emitter, x: Any, of: Any) -> Any:
    grown = e.exp(e.ir.fneg(e.larger(of, e.constant(-88.0, of))))
    return e.ir.fdiv(x, e.ir.fadd(e.constant(1.0, x), grown))


ACTIVATIONS: Mapping[str, Callable[[Emitter, Any], Any]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}

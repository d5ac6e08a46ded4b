"""Made-up quantized weights for tests of a device's kernels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.weights import WeightFormat, dequantize
from pallas_kernels.weights.held import Quantized

NUM_LAYERS, LAYER = 2, 1


class Call(NamedTuple):
    """Rows and weights of all layers."""

    x: jax.Array
    weight: Quantized


def make(form: WeightFormat, num_rows: int, num_outputs: int, num_inputs: int) -> Call:
    """Return random rows of bfloat16, and weights of all layers."""
    x = np.random.default_rng(1).standard_normal((num_rows, num_inputs)).astype(ml_dtypes.bfloat16)
    return Call(jnp.asarray(x), random_weights(form, (NUM_LAYERS, num_outputs, num_inputs))[0])


def random_weights(form: WeightFormat, shape: tuple[int, ...]) -> tuple[Quantized, np.ndarray]:
    """Return weights as a device holds them, and the float32 numbers that they represent."""
    rng = np.random.default_rng(0)
    parts: dict[str, np.ndarray] = {}
    for name in form.parts:
        part_shape, dtype = (*shape[:-1], form.width(name, shape[-1])), form.dtype(name)
        if name == "codes":
            part, dtype = _codes(rng, form, part_shape), np.dtype(np.uint8) if form.is_packed else dtype
        elif dtype.kind in "iu":
            part = rng.integers(0, 16, part_shape)
        else:
            part = rng.uniform(0.5, 2, part_shape) / 16
        parts[name] = part.astype(dtype)
    held = {
        name: jnp.asarray(part, jnp.uint4 if name == "codes" and form.bits == 4 else part.dtype)
        for name, part in parts.items()
    }
    return Quantized(held, form), dequantize(parts, form)


def _codes(rng: np.random.Generator, form: WeightFormat, shape: tuple[int, ...]) -> np.ndarray:
    if form.is_packed:
        return rng.integers(0, 2**form.bits, shape)
    codes = rng.integers(0, 256, shape, np.uint8).view(form.code_dtype)
    return codes if form.values == "integer" else np.where(np.isfinite(codes.astype(np.float32)), codes, 0)


def exact(call: Call, *, rounded: bool = True) -> np.ndarray:
    """Return the product in float64, with weights rounded to bfloat16 unless their sums are scaled."""
    form = call.weight.format
    layer = {name: np.asarray(part[LAYER]) for name, part in call.weight.parts.items()}
    numbers = dequantize(_plain(layer, form), form)
    if rounded and form.group is not None:
        numbers = numbers.astype(ml_dtypes.bfloat16)
    return np.asarray(call.x, np.float64) @ numbers.astype(np.float64).T


def _plain(parts: dict[str, np.ndarray], form: WeightFormat) -> dict[str, np.ndarray]:
    return parts | ({"codes": parts["codes"].astype(np.uint8)} if form.is_packed else {})


def sizes_of_sums(call: Call) -> np.ndarray:
    """Return the sums of the products' magnitudes; errors of float32 sums are proportional to them."""
    form = call.weight.format
    layer = {name: np.asarray(part[LAYER]) for name, part in call.weight.parts.items()}
    numbers = np.abs(dequantize(_plain(layer, form), form).astype(np.float64))
    return np.abs(np.asarray(call.x, np.float64)) @ numbers.T

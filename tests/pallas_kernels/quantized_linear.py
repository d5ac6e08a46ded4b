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
    """Return random rows of bfloat16, and weights as a device holds them."""
    rng = np.random.default_rng(0)
    parts = {}
    for name in form.parts:
        shape = (NUM_LAYERS, num_outputs, form.width(name, num_inputs))
        dtype = form.dtype(name)
        if name == "codes":
            part = _codes(rng, form, shape)
        elif dtype.kind in "iu":
            part = rng.integers(0, 16, shape)
        else:
            part = rng.uniform(0.5, 2, shape) / 16
        parts[name] = jnp.asarray(part.astype(dtype), jnp.uint4 if name == "codes" and form.bits == 4 else dtype)
    x = rng.standard_normal((num_rows, num_inputs)).astype(ml_dtypes.bfloat16)
    return Call(jnp.asarray(x), Quantized(parts, form))


def _codes(rng: np.random.Generator, form: WeightFormat, shape: tuple[int, ...]) -> np.ndarray:
    if form.is_packed:
        return rng.integers(0, 2**form.bits, shape)
    codes = rng.integers(0, 256, shape, np.uint8).view(form.code_dtype)
    return codes if form.values == "integer" else np.where(np.isfinite(codes.astype(np.float32)), codes, 0)


def exact(call: Call, *, rounded: bool = True) -> np.ndarray:
    """Return the product in float64, of weights that are rounded to bfloat16 unless their sums are scaled."""
    form = call.weight.format
    layer = {name: np.asarray(part[LAYER]) for name, part in call.weight.parts.items()}
    numbers = dequantize(layer | {"codes": layer["codes"].astype(form.code_dtype)}, form)
    if rounded and form.group is not None:
        numbers = numbers.astype(ml_dtypes.bfloat16)
    return np.asarray(call.x, np.float64) @ numbers.astype(np.float64).T


def sizes_of_sums(call: Call) -> np.ndarray:
    """Return the sums of the products' sizes, to which errors of float32 sums are in proportion."""
    form = call.weight.format
    layer = {name: np.asarray(part[LAYER]) for name, part in call.weight.parts.items()}
    numbers = np.abs(dequantize(layer | {"codes": layer["codes"].astype(form.code_dtype)}, form).astype(np.float64))
    return np.abs(np.asarray(call.x, np.float64)) @ numbers.T

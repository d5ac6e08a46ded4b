"""Run the GPUs' matmuls by quantized weights in their interpreter, and check products against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear.gpu import gpu_linear
from pallas_kernels.linear.gpu.sizes import Sizes
from pallas_kernels.linear.gpu.widen import Widening
from pallas_kernels.linear.gpu_mma import Sizes as MmaSizes
from pallas_kernels.linear.gpu_mma import gpu_mma_linear
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.gpu import interpreted
from tests.pallas_kernels.quantized_linear import LAYER, Call, exact, sizes_of_sums

OUTPUTS, INPUTS = 192, 512
RARE_THAT_RUN = ("q5_k", "q3_k", "gptq-8", "mxfp8")


class Kernel(NamedTuple):
    """A kernel with two ways to divide a call. The last tile of rows is not whole."""

    multiply: Callable[..., jax.Array]
    few: Any
    """Sizes for few rows: XLA adds up parts of sums."""
    many: Any
    """Sizes for many rows: sums are whole."""


# The rings are shorter than a part of a sum. Hopper's last tile of outputs is not whole either.
HOPPER = Kernel(
    gpu_linear,
    few=Sizes(rows=8, parts=2, is_whole=False, stages=2),
    many=Sizes(rows=16, parts=2, is_whole=True, stages=3),
)
MMA = Kernel(
    gpu_mma_linear,
    few=MmaSizes(rows=8, outputs=64, parts=2, is_whole=False, stages=3),
    many=MmaSizes(rows=16, outputs=64, parts=2, is_whole=True, stages=2),
)
both = pytest.mark.parametrize("kernel", [HOPPER, MMA], ids=["gpu", "gpu_mma"])


@cache
def compiled(kernel: Kernel, sizes: Any, out_dtype: Any) -> Any:
    def function(call: Call, layer: jax.Array, options: dict[str, Any]) -> jax.Array:
        settings: dict[str, Any] = {"out_dtype": out_dtype, "sizes": sizes, "interpret": True}
        return kernel.multiply(call.x, call.weight, layer, **settings, **options)

    return jax.jit(function)


def run(kernel: Kernel, call: Call, sizes: Any, out_dtype: Any = jnp.float32, **options: Any) -> np.ndarray:
    """Return the product, where the scales of other layers are NaN."""
    result = interpreted(compiled(kernel, sizes, out_dtype), poisoned(call), jnp.int32(LAYER), options)
    return np.asarray(result, np.float64)


def poisoned(call: Call) -> Call:
    """Return a call where the scales of other layers are NaN."""

    def poison(part: jax.Array) -> jax.Array:
        return part.at[:LAYER].set(jnp.nan) if jnp.issubdtype(part.dtype, jnp.floating) else part

    return call._replace(weight=call.weight.map(poison))


def multiplied(call: Call) -> np.ndarray:
    """Return the product in float64 by the numbers that the kernel multiplies by."""
    form = call.weight.format
    layer = call.weight.map(lambda part: part[LAYER])
    if form.group is None:
        return exact(call)
    numbers = np.asarray(layer.values(), np.float64).reshape(call.weight.shape[1], -1, form.group)
    parts = {name: np.asarray(part, np.float64) for name, part in layer.parts.items() if name != "codes"}
    spread = {
        name: np.repeat(part, numbers.shape[1] // part.shape[1], axis=1)[..., None] for name, part in parts.items()
    }
    numbers = (numbers - spread.get("zeros", 0)) * spread["scales"]
    if Widening(form).scales_numbers:
        numbers = numbers.astype(jnp.bfloat16).astype(np.float64)
    numbers = numbers * spread.get("scale_factors", 1) - spread.get("mins", 0) * spread.get("min_factors", 1)
    return np.asarray(call.x, np.float64) @ numbers.reshape(len(numbers), -1).T


def sizes_with_mins(call: Call) -> np.ndarray:
    """Return the sums of the magnitudes of products, those of mins apart."""
    layer = call.weight.map(lambda part: part[LAYER])
    parts = dict(layer.parts)
    mins = np.zeros((call.weight.shape[1], 1))
    if "mins" in parts:
        mins = np.asarray(layer.scales_and_mins()[1], np.float64)
        parts["mins"] = jnp.zeros_like(parts["mins"])
    length = call.x.shape[1] // mins.shape[1]
    spread = np.repeat(mins, length, axis=1)
    weight = Quantized({name: part[None].repeat(LAYER + 1, 0) for name, part in parts.items()}, layer.format)
    return sizes_of_sums(call._replace(weight=weight)) + abs(np.asarray(call.x, np.float64)) @ spread.T


def check(call: Call, got: np.ndarray) -> None:
    """Check a product: numbers are rounded once where they have scales, and the rest is exact but for float32 sums."""
    form, sizes = call.weight.format, sizes_with_mins(call)
    # Products of codes of 8 bits and scales of 11 are rounded once but for a few that are nearly between two numbers.
    tolerance = 1e-4 if form.bits == 8 and form.scale_dtype == "float16" else 4e-6
    assert (abs(got - multiplied(call)) <= tolerance * sizes).all()
    assert (abs(got - exact(call, rounded=False)) <= 2**-9 * sizes).all()

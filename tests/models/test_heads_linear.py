"""Matrices of heads are read in place, and a row has the same bits beside any number of other rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.models.layers.linear import heads_linear
from jaxllm.models.weights import LayerOf, Ops
from pallas_kernels.grouped_matmul import GroupedMatmul

pytestmark = pytest.mark.models

LAYERS, HEADS, OUTPUTS, INPUTS = 3, 5, 96, 64


def multiply(x_tni: jax.Array, stack: jax.Array, layer: jax.Array | int, num_rows: int, way: str) -> jax.Array:
    held: Any = LayerOf(stack, layer, num_rows, Ops(by_head=GroupedMatmul(way)))
    return heads_linear(x_tni, nnx.Param(held))


def make(t: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(t)
    shapes = (t, HEADS, INPUTS), (LAYERS, HEADS, OUTPUTS, INPUTS)
    x, stack = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return x, stack


@pytest.mark.parametrize("way", ["xla", "cpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("t", [1, 7, 40])
def test_each_head_has_its_own_matrix(t: int, dtype: Any, way: str) -> None:
    x, stack = make(t, dtype)
    got = jax.jit(partial(multiply, num_rows=t, way=way))(x, stack, 2)
    assert (got.shape, got.dtype) == ((t, HEADS, OUTPUTS), dtype)
    exact = np.einsum("tni,noi->tno", *(np.asarray(each, np.float64) for each in (x, stack[2])))
    tolerance = 1e-4 if dtype == jnp.float32 else 0.15
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_others(dtype: Any) -> None:
    x, stack = make(40, dtype)
    run = partial(jax.jit(multiply, static_argnums=(3, 4)), stack=stack, layer=1)
    whole = run(x, num_rows=40, way="cpu")
    for rows in (slice(0, 1), slice(3, 9), slice(20, 40)):
        few = run(x[rows], num_rows=rows.stop - rows.start, way="cpu")
        np.testing.assert_array_equal(np.asarray(few, np.float32), np.asarray(whole[rows], np.float32))


def test_matrices_are_not_copied() -> None:
    """A loop over the layers takes less memory than one layer's matrices."""
    sizes = (4, 8, 256, 256)
    x, stack = jax.ShapeDtypeStruct((2, 8, 256), jnp.bfloat16), jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def run(x: jax.Array, stack: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, sizes[0], lambda i, x: multiply(x, stack, i, 2, "cpu"), x)

    analysis = jax.jit(run).lower(x, stack).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 8 * 256 * 256 * 2 / 4

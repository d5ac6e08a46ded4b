"""Calls that the tests of the grouped matmul's kernels use."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import Groups, capacity
from pallas_kernels.grouped_matmul.reference import reference_grouped_matmul
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

NUM_LAYERS, LAYER = 2, 1
ALIGNMENT = 16
# Experts without rows at both ends and inside; experts with one row, with a slab and a row, and with several spans.
COUNTS = (0, 3, 0, 16, 17, 83, 1, 0)


class Call(NamedTuple):
    x: jax.Array
    w: jax.Array | Quantized
    groups: Groups

    @property
    def rows(self) -> np.ndarray:
        """The rows that belong to a group."""
        pairs = zip(*map(np.asarray, self.groups), strict=True)
        return np.concatenate([np.arange(start, start + count) for start, count in pairs])


def make(counts: tuple[int, ...], num_in: int, num_out: int, dtype: Any, form: WeightFormat | None = None) -> Call:
    """Make a call whose other rows, layers and experts are NaN."""
    rng = np.random.default_rng(0)
    counts_e = np.array(counts, np.int32)
    padded_e = -(-counts_e // ALIGNMENT) * ALIGNMENT
    groups = Groups(*(jnp.asarray(x, jnp.int32) for x in (np.cumsum(padded_e) - padded_e, counts_e)))
    x = np.full((capacity(sum(counts), len(counts), ALIGNMENT), num_in), np.nan, np.float32)
    w = np.full((NUM_LAYERS, len(counts), num_out, num_in), np.nan, np.float32)
    w[LAYER, counts_e > 0] = rng.standard_normal((np.count_nonzero(counts_e), num_out, num_in)) / num_in**0.5
    weight: Any = jnp.asarray(w, dtype)
    if form is not None:
        codes = jnp.asarray(np.clip(np.nan_to_num(40 * w, nan=127), -127, 127), jnp.int8)
        scales = jnp.asarray(rng.uniform(0.5, 1.5, (*w.shape[:3], 1)) / 40, jnp.float32)
        weight = Quantized({"codes": codes, "scales": scales}, form)
    call = Call(jnp.asarray(x, dtype), weight, groups)
    return call._replace(x=call.x.at[call.rows].set(jnp.asarray(rng.standard_normal((sum(counts), num_in)), dtype)))


def reference(call: Call, activation: str | None) -> np.ndarray:
    numbers = call.w.codes.astype(jnp.float32) * call.w.scales if isinstance(call.w, Quantized) else call.w
    x, w = (np.asarray(array, np.float64) for array in (call.x, numbers))
    return reference_grouped_matmul(x, w, LAYER, call.groups, activation=activation)

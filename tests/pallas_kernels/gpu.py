"""Run the GPU's kernels in their interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races, reset_gpu_interpret_mode_state

from pallas_kernels.paged_attention import NO_WINDOW, FusedPool, SplitPool
from tests.pallas_kernels.steps import LAYER, NUM_LAYERS, Step, fused, reference

_DEVICE = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=1)
H100 = jax.sharding.AbstractMesh((), (), abstract_device=_DEVICE)
"""The mesh under which the kernels are traced."""


def interpreted(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of kernels, and fail on races."""
    reset_gpu_interpret_mode_state()
    with jax.sharding.use_abstract_mesh(H100):
        result = jax.block_until_ready(function(*args))
    assert not get_races().races_found
    return result


def traced(function: Any, *args: Any) -> str:
    """Return a jitted function of kernels as it is traced, with the kernels' names."""
    with jax.sharding.use_abstract_mesh(H100):
        return str(function.trace(*args).jaxpr)


def filled(step: Step, *, window: int = NO_WINDOW, **settings: Any) -> tuple[FusedPool, np.ndarray]:
    """Return the pool with the step's keys and values in it, and the expected output.

    Null blocks are NaN, and so are blocks before the windows of all of a sequence's rows.
    """
    expected, pool = reference(step, window=window, **settings)
    num_blocks, batch = pool.k.shape[0] // NUM_LAYERS, step.batch
    lens_s, num_rows_s = np.asarray(batch.context_lens_s), np.asarray(batch.query_ends_s - batch.query_starts_s)
    lows_s = np.maximum(lens_s - num_rows_s - window + 1, 0)
    earlier = [tables[: low // pool.v.shape[2]] for tables, low in zip(batch.block_tables_sm, lows_s, strict=True)]
    for x in pool:
        x[::num_blocks] = np.nan
        x[LAYER * num_blocks + np.concatenate(earlier)] = np.nan
    return FusedPool(fused(pool).kv.astype(step.pool.k.dtype)), expected


def assert_pools_equal(pool: FusedPool, expected: SplitPool) -> None:
    """Check that pools are equal except for the null block, where padding goes."""
    null_block = LAYER * (pool.kv.shape[0] // NUM_LAYERS)
    got, want = (np.delete(np.asarray(x.kv, np.float32), null_block, axis=0) for x in (pool, fused(expected)))
    np.testing.assert_array_equal(got, want)

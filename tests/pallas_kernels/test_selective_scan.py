"""The scan of Mamba in plain XLA, by tokens and by tiles, equals the float32 reference over poisoned states."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.selective_scan import SelectiveScan, SelectiveScanShape, pick
from pallas_kernels.recurrent_state.selective_scan.cases import CASES
from pallas_kernels.recurrent_state.selective_scan.reference import reference_selective_scan
from tests.pallas_kernels.states import (
    LAYER,
    LONG,
    MIXED,
    NUM_LAYERS,
    Elsewhere,
    Step,
    alone,
    assert_pools_equal,
    assert_saves_change_nothing,
    make,
    run_op,
    scratch_bytes,
)

pytestmark = pytest.mark.cpu_kernels


@dataclass(frozen=True)
class ElsewhereSelectiveScan(Elsewhere, SelectiveScan):
    """The op as plain XLA runs it on a TPU or GPU."""


def assert_matches_reference(op: SelectiveScan, step: Step, tolerance: float) -> None:
    expected, expected_pool = reference_selective_scan(
        *step.inputs, pool=step.pool, batch=step.batch, layer=LAYER, num_layers=NUM_LAYERS
    )
    out, pool = run_op(op, step)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=tolerance, atol=tolerance * 3)
    assert_pools_equal(pool, expected_pool, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("make_op", [SelectiveScan, ElsewhereSelectiveScan])
def test_matches_reference(make_op: type[SelectiveScan], dtype: Any, tolerance: float) -> None:
    shape = CASES["tiny"].shape(dtype)
    assert_matches_reference(make_op(shape), make(0, shape), tolerance)


@pytest.mark.usefixtures("few_tiles_at_once")
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("chunks", [MIXED, LONG])
def test_tiles_match_reference(chunks: list[Chunk], strong: bool) -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(9, shape, chunks)
    if strong:
        # One number in five forgets everything, others next to nothing.
        x, dt, a, *rest = step.inputs
        is_strong = np.random.default_rng(1).uniform(size=dt.shape) < 0.2
        dt = np.where(is_strong, np.float32(1000), dt * 0.01)
        step = step._replace(inputs=(np.where(is_strong, x * 1e-3, x), dt, a, *rest))
    assert_matches_reference(ElsewhereSelectiveScan(shape), step, 2e-5)


@pytest.mark.parametrize("num_channels", [40, 256])
def test_channels_that_are_no_whole_parts(num_channels: int) -> None:
    shape = SelectiveScanShape(num_channels, 16, jnp.dtype(jnp.float32))
    assert_matches_reference(SelectiveScan(shape), make(1, shape), 1e-5)


def test_steps_of_decodes_alone() -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    assert_matches_reference(SelectiveScan(shape), alone(make(9, shape, MIXED[:5])), 1e-5)


def test_saves_change_nothing() -> None:
    shape = CASES["tiny"].shape(jnp.bfloat16)
    op = SelectiveScan(shape)
    assert_saves_change_nothing(lambda step: run_op(op, step), make(6, shape))


def test_the_pool_is_not_copied() -> None:
    op = SelectiveScan(CASES["tiny"].shape(jnp.float32))
    pool, aliased, scratch = scratch_bytes(op, make(7, op.shape).inputs, 4000, of_layer=(2, 5))
    assert aliased >= pool
    assert scratch < pool / 4


def test_all_platforms_run_plain_xla() -> None:
    shape = CASES["jamba-mini"].shape()
    for platform in ("cpu", "gpu", "tpu"):
        op, reason = pick(shape, platform)
        assert (op.implementation, reason) == ("xla", None)
        assert op.pool_spec(2, 5).shape == (10, 64, 16, 128)


def test_refuses_arrays_of_another_shape() -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(8, shape)
    x, *rest = step.inputs
    with pytest.raises(ValueError, match=r"x is .* not"):
        run_op(SelectiveScan(shape), step._replace(inputs=(x[:, :1], *rest)))

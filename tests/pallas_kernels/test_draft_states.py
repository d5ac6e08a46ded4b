"""The states after rows of drafts are kept, in every op and on every platform's way, and change no output."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape
from pallas_kernels.recurrent_state.gated_delta.cases import CASES as DELTA
from pallas_kernels.recurrent_state.selective_scan.cases import CASES as SELECTIVE
from pallas_kernels.recurrent_state.state_space import StateSpaceShape
from pallas_kernels.recurrent_state.state_space.cases import CASES as SPACE
from tests.pallas_kernels import test_causal_conv as conv
from tests.pallas_kernels import test_gated_delta as delta
from tests.pallas_kernels import test_selective_scan as selective
from tests.pallas_kernels import test_state_space as space
from tests.pallas_kernels.gpu import interpreted
from tests.pallas_kernels.states import DRAFTED, NUM_SLOTS, assert_pools_equal, make, run_op

FLOAT32 = jnp.dtype(jnp.float32)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_token_by_token(implementation: str) -> None:
    for name in ("tiny", "tiny-key-decay"):
        shape = DELTA[name].shape(FLOAT32)
        delta.assert_matches_reference(shape, implementation, make(0, shape, DRAFTED), 1e-5)
    shape = SPACE["tiny"].shape(FLOAT32)
    space.assert_matches_reference(shape, implementation, make(1, shape, DRAFTED), 1e-5)
    for name in ("tiny", "tiny-short"):
        conv.assert_matches_reference(conv.CASES[name], FLOAT32, implementation, 2, 1e-5, DRAFTED)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("make_op", [selective.SelectiveScan, selective.ElsewhereSelectiveScan])
def test_the_scan_of_mamba(make_op: Any) -> None:
    shape = SELECTIVE["tiny"].shape(FLOAT32)
    selective.assert_matches_reference(make_op(shape), make(3, shape, DRAFTED), 2e-5)


@pytest.mark.cpu_kernels
@pytest.mark.usefixtures("few_tiles_at_once")
def test_by_tiles() -> None:
    pairs: list[tuple[Any, Any]] = [
        (delta.ElsewhereGatedDelta(DELTA["tiny"].shape(FLOAT32)), delta.reference_gated_delta),
        (space.ElsewhereStateSpace(SPACE["tiny"].shape(FLOAT32)), space.reference_state_space),
    ]
    for op, reference in pairs:
        step = make(4, op.shape, DRAFTED)
        places: dict[str, Any] = {
            "pool": step.pool,
            "batch": step.batch,
            "layer": delta.LAYER,
            "num_layers": delta.NUM_LAYERS,
        }
        expected, expected_pool = reference(*step.inputs, **places)
        out, pool = run_op(op, step)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=5e-5)
        assert_pools_equal(pool, expected_pool, rtol=2e-5, atol=2e-5)


@pytest.mark.cpu_kernels
def test_kept_states_have_the_bits_of_decodes() -> None:
    """The state after a draft is the one that a step of its own would have left."""
    shape = DELTA["tiny"].shape(FLOAT32)
    op, step = GatedDelta(shape, "cpu"), make(5, shape, DRAFTED)
    _, pool = run_op(op, step)
    plain = step.batch._replace(row_slots_t=None)
    start = int(plain.query_starts_s[7])  # the chunk with five drafts
    first = delta.LAYER * NUM_SLOTS
    for kept, slot in enumerate(DRAFTED[7].rows, 1):
        ends_s = np.where(np.arange(len(plain.query_starts_s)) == 7, start + kept, plain.query_ends_s)
        _, shorter = run_op(op, step._replace(batch=plain._replace(query_ends_s=ends_s)))
        np.testing.assert_array_equal(pool[first + slot], shorter[first + DRAFTED[7].write])


@pytest.mark.kernels
@pytest.mark.usefixtures("quick_compilation", "tpu_interpreter", "few_tiles_at_once")
def test_kernels_of_a_tpu() -> None:
    shape = GatedDeltaShape(1, 1, 128, 128, False, FLOAT32)
    delta.assert_matches_reference(shape, "tpu", make(6, shape, DRAFTED), 2e-5)
    shape = StateSpaceShape(2, 64, 1, 128, FLOAT32)
    space.assert_matches_reference(shape, "tpu", make(7, shape, DRAFTED), 2e-5)
    conv.assert_matches_reference(conv.Case(128, has_bias=True), FLOAT32, "tpu", 8, 1e-5, DRAFTED)


@pytest.mark.kernels
@pytest.mark.usefixtures("quick_compilation", "few_tiles_at_once")
def test_kernels_of_a_gpu() -> None:
    shape = GatedDeltaShape(1, 2, 64, 64, False, jnp.dtype(jnp.bfloat16))
    interpreted(delta.assert_matches_reference, shape, "gpu", make(9, shape, DRAFTED), 1e-2, 1e-4)
    conv.assert_matches_reference(conv.Case(128), FLOAT32, "gpu", 10, 1e-5, DRAFTED)

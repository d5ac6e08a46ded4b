"""The gated delta rule, in plain XLA and as a CPU's kernel, equals the float32 reference over poisoned states."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.native import processor
from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape, pick
from pallas_kernels.recurrent_state.gated_delta.cases import CASES
from pallas_kernels.recurrent_state.gated_delta.reference import reference_gated_delta
from tests.pallas_kernels.states import (
    LAYER,
    LONG,
    MIXED,
    NUM_LAYERS,
    Elsewhere,
    Step,
    alone,
    assert_pools_equal,
    assert_rows_are_independent,
    assert_saves_change_nothing,
    make,
    run_op,
    scratch_bytes,
)

pytestmark = pytest.mark.cpu_kernels

IMPLEMENTATIONS = ["xla", "cpu"]


def assert_matches_reference(
    shape: GatedDeltaShape, implementation: str, step: Step, tolerance: float, state_tolerance: float = 2e-5
) -> None:
    expected, expected_pool = reference_gated_delta(
        *step.inputs, pool=step.pool, batch=step.batch, layer=LAYER, num_layers=NUM_LAYERS
    )
    out, pool = run_op(GatedDelta(shape, implementation, interpret=implementation == "gpu"), step)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=tolerance, atol=tolerance)
    assert_pools_equal(pool, expected_pool, rtol=state_tolerance, atol=state_tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [("tiny", jnp.float32, 1e-5), ("tiny", jnp.bfloat16, 1e-2), ("tiny-key-decay", jnp.float32, 1e-5)],
)
def test_matches_reference(implementation: str, case: str, dtype: Any, tolerance: float) -> None:
    shape = CASES[case].shape(dtype)
    assert_matches_reference(shape, implementation, make(0, shape), tolerance)


@pytest.mark.parametrize("has_key_decay", [False, True])
def test_heads_as_wide_as_those_of_real_models(has_key_decay: bool) -> None:
    shape = GatedDeltaShape(2, 4, 128, 128, has_key_decay, jnp.dtype(jnp.float32))
    assert_matches_reference(shape, "cpu", make(1, shape), 1e-5)


@pytest.mark.usefixtures("lesser_set")
@pytest.mark.parametrize("case", ["tiny", "tiny-key-decay"])
def test_with_lesser_sets(case: str) -> None:
    shape = CASES[case].shape(jnp.bfloat16)
    assert_matches_reference(shape, "cpu", make(2, shape), 1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_of_decodes_alone(implementation: str) -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    assert_matches_reference(shape, implementation, alone(make(9, shape, MIXED[:5])), 1e-5)


@dataclass(frozen=True)
class ElsewhereGatedDelta(Elsewhere, GatedDelta):
    """The op as plain XLA runs it on a TPU or GPU."""


def ordinary(step: Step) -> Step:
    return step


def with_strong_decays(step: Step) -> Step:
    """One token in five forgets everything, like heads that look at a few tokens only."""
    q, k, v, log_decay, beta = step.inputs
    is_strong = np.random.default_rng(1).uniform(size=log_decay.shape) < 0.2
    return step._replace(inputs=(q, k, v, np.where(is_strong, np.float32(-1000), log_decay * 0.01), beta))


def with_alike_keys(step: Step) -> Step:
    """Tokens correct the same value again and again, and forget next to nothing: powers of A would overflow."""
    q, k, v, log_decay, beta = step.inputs
    alike = np.where(np.isnan(k), k, k[step.rows[0]] + 1e-3 * k)
    return step._replace(inputs=(q, alike, v, log_decay * 1e-4, np.where(np.isnan(beta), beta, 1 - beta * 1e-3)))


CHANGES = [ordinary, with_strong_decays, with_alike_keys]


@pytest.mark.usefixtures("few_tiles_at_once")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("chunks", [MIXED, LONG])
@pytest.mark.parametrize("case", ["tiny", "tiny-key-decay"])
def test_tiles_match_reference(case: str, chunks: list[Chunk], change: Any) -> None:
    shape = CASES[case].shape(jnp.float32)
    step = change(make(9, shape, chunks))
    expected, expected_pool = reference_gated_delta(
        *step.inputs, pool=step.pool, batch=step.batch, layer=LAYER, num_layers=NUM_LAYERS
    )
    out, pool = run_op(ElsewhereGatedDelta(shape), step)
    # States of similar keys are as large as the values times the number of tokens.
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    assert_pools_equal(pool, expected_pool, rtol=2e-5, atol=2e-5)


def test_only_a_cpu_goes_token_by_token() -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(10, shape)
    op = GatedDelta(shape)
    jitted = jax.jit(op.__call__, static_argnames="num_layers")
    traced = jitted.trace(*step.inputs, step.pool, step.batch, layer=0, num_layers=NUM_LAYERS)
    texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu", "cuda")}
    assert {platform: "dot_general" in text for platform, text in texts.items()} == {
        "cpu": False,
        "tpu": True,
        "cuda": True,
    }


def test_more_decodes_than_units() -> None:
    """Units of many decodes have several parts each, and fetch the next ones."""
    shape = CASES["tiny"].shape(jnp.float32)
    chunks = [Chunk(1, 5, slot, slot) for slot in range(1, 24)]
    for implementation in IMPLEMENTATIONS:
        assert_matches_reference(shape, implementation, make(3, shape, chunks), 1e-5)


def test_begins_in_a_step_of_padding_alone() -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(4, shape, [Chunk(2, 0, 0, 1)])
    empty = step.batch._replace(
        query_ends_s=step.batch.query_starts_s, write_slots_s=np.zeros_like(step.batch.write_slots_s)
    )
    for implementation in IMPLEMENTATIONS:
        out, _ = run_op(GatedDelta(shape, implementation), step._replace(batch=empty))
        np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("case", ["tiny", "tiny-key-decay"])
def test_a_rows_bits_are_its_own(case: str) -> None:
    shape = CASES[case].shape(jnp.bfloat16)
    op = GatedDelta(shape, "cpu")
    assert_rows_are_independent(lambda step: run_op(op, step), lambda chunks: make(5, shape, chunks))
    assert_saves_change_nothing(lambda step: run_op(op, step), make(6, shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_pool_is_not_copied(implementation: str) -> None:
    op = GatedDelta(CASES["tiny"].shape(jnp.float32), implementation)
    inputs = make(7, op.shape).inputs
    pool, aliased, scratch = scratch_bytes(op, inputs, 4000)
    assert aliased >= pool
    assert scratch < pool / 4


def test_which_implementation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CASES["qwen3-next-80b-a3b"].shape()
    op, reason = pick(shape, "cpu")
    assert (op.implementation, reason, op.missing_kernels("cpu")) == ("cpu", None, None)
    assert op.pool_spec(2, 5).shape == (10, 32, 4, 128, 32)
    op, reason = pick(shape._replace(value_dim=72), "cpu")
    assert (op.implementation, reason) == ("xla", "key_dim and value_dim must be multiples of 16, not 128 and 72")
    assert op.pool_spec(2, 5).shape == (10, 32, 128, 72)
    assert pick(shape, "tpu", architecture="TPU v6 lite")[0].implementation == "tpu"
    assert (
        pick(shape._replace(key_dim=64), "tpu")[1] == "key_dim and value_dim must be multiples of 128, not 64 and 128"
    )
    assert pick(shape._replace(num_value_heads=256), "tpu")[1] == "a state of 16 MiB does not fit in VMEM several times"
    assert pick(shape, "gpu", architecture="9.0")[0].implementation == "gpu"
    assert "Hopper" in str(pick(shape, "gpu", architecture="8.0")[1])
    assert pick(shape._replace(key_dim=512), "gpu", architecture="9.0")[1] == (
        "value_dim and key_dim must be multiples of 64, and key_dim at most 256, not 128 and 512"
    )
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32, not float16"):
        pick(shape._replace(dtype=jnp.dtype(jnp.float16)), "cpu", "cpu")
    plain = processor.restricted(processor.host(), "plain")
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: plain)
    assert "neither AVX2 and FMA nor NEON" in str(pick(shape, "cpu")[1])


def test_refuses_arrays_of_another_shape() -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(8, shape)
    op = GatedDelta(shape)
    q, *rest = step.inputs
    with pytest.raises(ValueError, match=r"q is .* not"):
        run_op(op, step._replace(inputs=(q[:, :1], *rest)))
    with pytest.raises(ValueError, match=r"q is .* bfloat16, not .* float32"):
        run_op(op, step._replace(inputs=(q.astype(jnp.bfloat16), *rest)))
    with pytest.raises(ValueError, match="does not hold 2 layers"):
        run_op(op, step._replace(pool=step.pool[:, :, :16]))

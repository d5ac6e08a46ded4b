"""The trials of every op accept the CPU's kernels, and notice one wrong number and one wrong write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import GroupedMatmul, MatmulShape
from pallas_kernels.latent_attention import LatentAttention, LatentShape
from pallas_kernels.linear import Linear, LinearShape
from pallas_kernels.linear.cases import FORMATS, RARE
from pallas_kernels.paged_attention import AttentionShape, PagedAttention
from pallas_kernels.recurrent_state.causal_conv import CausalConv, ConvShape
from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape
from pallas_kernels.recurrent_state.state_space import StateSpace, StateSpaceShape
from pallas_kernels.segment_attention import SegmentAttention, SegmentShape
from pallas_kernels.trials.attention import paged_trials
from pallas_kernels.trials.latents import latent_trials
from pallas_kernels.trials.matmuls import grouped_trials, linear_trials
from pallas_kernels.trials.segments import segment_trials
from pallas_kernels.trials.states import state_trials
from pallas_kernels.trials.trial import Trial, describe, largest_error
from pallas_kernels.weights import WeightFormat

pytestmark = pytest.mark.cpu_kernels

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
PAGED = PagedAttention(AttentionShape(4, 2, 32, 16, BF16, BF16), "cpu")
LATENT = LatentAttention(LatentShape(2, 32, 32, 16, F32, F32), "cpu")
MATMUL = LinearShape(128, 128, F32, F32, FORMATS["q4_0"], "silu")
EXPERTS = MatmulShape(10, 64, 64, F32, FORMATS["int8"], F32, "silu")
TRIALS: dict[str, Iterator[Trial]] = {
    "paged_attention": paged_trials(PAGED, window=50, soft_cap=20.0, has_sinks=True),
    "latent_attention": latent_trials(LATENT),
    "recurrent_state.gated_delta": state_trials(GatedDelta(GatedDeltaShape(1, 2, 16, 16, False, F32), "cpu")),
    "recurrent_state.state_space": state_trials(StateSpace(StateSpaceShape(2, 16, 1, 16, F32), "cpu")),
    "recurrent_state.causal_conv": state_trials(CausalConv(ConvShape(32, 4, BF16), "cpu")),
    "segment_attention": segment_trials(SegmentAttention("cpu"), SegmentShape(2, 16, F32)),
    "linear": linear_trials(Linear("cpu"), MATMUL._replace(format=None)),
    "linear of int4/32+offset8": linear_trials(Linear("cpu"), MATMUL, is_packed=True),
    "grouped_matmul": grouped_trials(GroupedMatmul("cpu"), EXPERTS),
}


def test_formats_that_differ_have_trials_of_their_own() -> None:
    group = WeightFormat(4, 32, factor_group=256)
    changes: list[dict[str, Any]] = [
        {},
        {"bits": 3},
        {"group": 64},
        {"values": "e2m1"},
        {"offset": 8},
        {"scale_dtype": "bfloat16"},
        {"has_mins": True},
        {"zero_dtype": "uint8"},
        {"zero_dtype": "float16"},
        {"factor_group": None},
        {"factor_group": 128},
        {"factor_dtype": "float32"},
        {"is_ordered": True},
    ]
    assert {name for change in changes for name in change} == {field.name for field in fields(WeightFormat)}
    formats = {*(replace(group, **change) for change in changes), *FORMATS.values(), *RARE.values()}
    shapes = [MATMUL._replace(format=form) for form in formats]
    assert len({next(linear_trials(Linear("cpu"), shape))[:4] for shape in shapes}) == len(formats)
    experts = [EXPERTS._replace(format=form) for form in formats]
    assert len({next(grouped_trials(GroupedMatmul("cpu"), shape))[:4] for shape in experts}) == len(formats)


@pytest.mark.parametrize("op", TRIALS)
def test_it_notices_one_wrong_number_and_one_wrong_write(op: str) -> None:
    trial = [*TRIALS[op]][1]
    assert trial.op == op
    call = trial.make()
    result: Any = jax.jit(call.function)(*call.arguments)
    assert call.compare(result).is_right
    out, pool = result if isinstance(result, tuple) else (result, None)
    wrong = out.at[0].multiply(1.1)  # a row of a decode, or of the first group
    assert not call.compare(wrong if pool is None else (wrong, pool)).is_right
    if pool is not None:
        changed = jax.tree.map(lambda x: x.at[-1].set(jnp.asarray(1, x.dtype)), pool)  # nobody's
        assert not call.compare((out, changed)).is_right


@pytest.mark.parametrize("is_packed", [False, True])
def test_weights_of_a_format_that_is_left_out_are_multiplied_in_plain_xla(is_packed: bool) -> None:
    trial = next(linear_trials(Linear("cpu", without=(MATMUL.format,)), MATMUL, is_packed=is_packed))
    call = trial.make()
    lowered = jax.jit(call.function).lower(*call.arguments)
    assert "custom_call" not in lowered.as_text()
    assert call.compare(lowered.compile()(*call.arguments)).is_right


def test_errors_are_parts_of_a_row() -> None:
    want = np.array([[3.0, -3.0], [0.0, 0.0]])
    assert largest_error(want, want) == 0
    assert largest_error(want + np.array([[0.06, 0.0], [0.0, 0.0]]), want) == pytest.approx(0.01)
    assert largest_error(want + np.array([[0.0, 0.0], [0.0, 1e-9]]), want) == np.inf
    assert np.isnan(largest_error(want * np.nan, want))


def test_shapes_for_people() -> None:
    assert describe(EXPERTS) == (
        "num_experts 10, num_outputs 64, num_inputs 64, dtype float32, format int8+scales:float32, out_dtype float32, "
        "activation silu"
    )
    assert describe(PAGED.shape).startswith("num_heads 4, num_kv_heads 2, head_dim 32, block_size 16, dtype bfloat16")

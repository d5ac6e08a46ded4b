"""The TPU's kernels that move the convolution's states equal the reference in the TPU interpreter, without a race."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_state.causal_conv import CausalConv
from pallas_kernels.recurrent_state.causal_conv.cases import Case
from tests.pallas_kernels.states import scratch_bytes
from tests.pallas_kernels.test_causal_conv import OF_LAYER, assert_matches_reference, make

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation", "tpu_interpreter")]


@pytest.mark.parametrize("case", [Case(128, has_bias=True), Case(256, 3, None)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_matches_reference(case: Case, dtype: Any, tolerance: float) -> None:
    assert_matches_reference(case, dtype, "tpu", 0, tolerance)


def test_the_pool_is_not_copied() -> None:
    shape = Case(128).shape(jnp.float32)
    pool, aliased, _ = scratch_bytes(CausalConv(shape, "tpu"), make(2, shape).inputs, 40, of_layer=OF_LAYER)
    assert aliased >= pool

"""The GPU's kernel of the convolution equals the float32 reference in the GPU interpreter, without a race."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.causal_conv.cases import Case
from pallas_kernels.recurrent_state.causal_conv.gpu import thread_block_channels
from tests.pallas_kernels.gpu import interpreted
from tests.pallas_kernels.states import MIXED
from tests.pallas_kernels.test_causal_conv import assert_matches_reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        (Case(384, has_bias=True), jnp.float32, 1e-5),
        (Case(1280, 3, None), jnp.bfloat16, 1e-2),
        (Case(256, 2), jnp.bfloat16, 1e-2),
        (Case(128, 7), jnp.float32, 1e-5),
    ],
)
def test_decodes_match_the_reference(case: Case, dtype: Any, tolerance: float) -> None:
    interpreted(assert_matches_reference, case, dtype, "gpu", 0, tolerance, MIXED[:5])


def test_a_state_may_be_saved_to_where_it_was_read() -> None:
    chunks = [Chunk(1, 9, 1, 2, 1, 1), Chunk(1, 9, 3, 3, 1, 4)]
    interpreted(assert_matches_reference, Case(128), jnp.float32, "gpu", 1, 1e-5, chunks)


def test_steps_with_chunks_match_the_reference() -> None:
    assert_matches_reference(Case(128), jnp.float32, "gpu", 2, 1e-5)


def test_channels_of_a_thread_block() -> None:
    assert thread_block_channels(10240, jnp.bfloat16) == 1024
    assert thread_block_channels(10240, jnp.float32) == 512
    assert thread_block_channels(3328, jnp.bfloat16) == 256

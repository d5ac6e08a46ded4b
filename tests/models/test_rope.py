"""RoPE tables are right at real sizes; the tiny goldens' short positions would hide a wrong last bit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import QueryScaling, RopeConfig
from jaxllm.models.rope import frequencies, query_scale, rope_table

POSITIONS = np.asarray([0, 1, 7, 1500, 8191, 32_767], np.int32)


@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 64), (1e5, 64), (5e5, 128), (1e6, 256)])
def test_frequencies_are_float32_powers_as_torch_rounds_them(theta: float, head_dim: int) -> None:
    exponents = [np.float32(i) / np.float32(head_dim) for i in range(0, head_dim, 2)]
    expected = [np.float32(1) / np.float32(theta ** float(exponent)) for exponent in exponents]
    np.testing.assert_array_equal(frequencies(RopeConfig(theta=theta), head_dim), np.asarray(expected))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e5),
        RopeConfig(rope_type="linear", theta=1e6, factor=8.0),
        RopeConfig(rope_type="llama3", theta=5e5, factor=8.0, original_max_position_embeddings=8192),
        RopeConfig(rope_type="yarn", theta=1e6, factor=4.0, original_max_position_embeddings=32_768),
    ],
    ids=lambda rope: rope.rope_type,
)
def test_far_positions_are_exact(rope: RopeConfig) -> None:
    cos, sin = rope_table(rope, 128, jnp.asarray(POSITIONS), jnp.asarray(POSITIONS + 1))
    # The product is rounded to float32, as in HF; cos and sin of it are then exact.
    angles = (POSITIONS.astype(np.float32)[:, None] * frequencies(rope, 128)).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=5e-7)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=5e-7)


def test_dynamic_scaling_starts_beyond_the_trained_length() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=2.0, max_position_embeddings=2048)
    position = jnp.asarray([100, 100, 100], jnp.int32)
    cos, _ = rope_table(rope, 64, position, jnp.asarray([101, 2048, 2049], jnp.int32))
    plain, _ = rope_table(RopeConfig(), 64, position[:1], position[:1])
    np.testing.assert_array_equal(cos[0], cos[1])
    np.testing.assert_allclose(cos[0], plain[0], rtol=0, atol=1e-5)
    assert np.abs(cos[2] - cos[1]).max() > 1e-5


def test_longrope_goes_by_the_length_of_each_sequence() -> None:
    short, long = tuple(1 + i / 8 for i in range(8)), tuple(1.0 + i for i in range(8))
    rope = RopeConfig(rope_type="longrope", short_factors=short, long_factors=long)
    cos, sin = rope_table(rope, 16, jnp.asarray([100, 100], jnp.int32), jnp.asarray([2048, 2049], jnp.int32))
    angles = 100 / (np.asarray([short, long]) * 10_000.0 ** (np.arange(8) / 8))
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=1e-5)


def test_no_wave_is_between_long_and_short_ones_if_their_bounds_are_one() -> None:
    rope = RopeConfig(
        rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=64
    )
    plain = frequencies(RopeConfig(), 64)
    expected = np.where(2 * np.pi / plain > 64, plain / 16, plain)
    np.testing.assert_array_equal(frequencies(rope, 64), expected)
    assert len({1.0, 16.0} & set((plain / expected).tolist())) == 2


@pytest.mark.parametrize(("first", "steps"), [(0, [0, 0, 1, 1, 4]), (1, [0, 1, 1, 2, 4])])
def test_queries_grow_with_each_length_that_is_behind_them(first: int, steps: list[int]) -> None:
    scale = query_scale(QueryScaling(0.1, 8192, first), jnp.asarray([0, 8191, 8192, 16_383, 32_768], jnp.int32))
    assert scale is not None
    assert scale.shape == (5, 1, 1)
    np.testing.assert_allclose(scale[:, 0, 0], 1 + 0.1 * np.log(1 + np.asarray(steps)), rtol=1e-6)


def test_a_proportional_table_leaves_the_last_pairs() -> None:
    rope = RopeConfig(rope_type="proportional", theta=1e6, rotated=0.25, factor=2.0)
    assert rope.head_order(512) is None
    whole = frequencies(RopeConfig(theta=1e6), 512)
    np.testing.assert_array_equal(frequencies(rope, 512), np.where(np.arange(256) < 64, whole / 2, 0))


def test_the_attention_factor_scales_both() -> None:
    cos, sin = rope_table(RopeConfig(attention_factor=2.0), 16, jnp.zeros(3, jnp.int32), jnp.ones(3, jnp.int32))
    assert cos.shape == sin.shape == (3, 8)
    np.testing.assert_array_equal(cos, np.full((3, 8), 2.0))

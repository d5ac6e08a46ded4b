"""Choices of positions as bits, and back, against loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chosen import spans_to_bits, to_array, to_bits, to_lists, to_positions

pytestmark = pytest.mark.cpu_kernels


@pytest.mark.parametrize("words", [1, 2, 40])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_bits_and_positions_are_the_same_choices(words: int, share: float) -> None:
    rng = np.random.default_rng()
    lists = [np.flatnonzero(rng.random(32 * words) < share) for _ in range(7)]
    chosen_tw = to_array(lists, words)
    count = max(map(len, lists)) + 3
    positions_tk = np.full((7, count), -1, np.int32)
    for row, positions in enumerate(lists):
        positions_tk[row, : len(positions)] = positions
    np.testing.assert_array_equal(to_positions(jnp.asarray(chosen_tw), count), positions_tk)
    np.testing.assert_array_equal(to_positions(jnp.asarray(chosen_tw), 3), positions_tk[:, :3])
    in_any_order = jnp.asarray(rng.permuted(positions_tk, axis=1))
    np.testing.assert_array_equal(to_bits(in_any_order, words), chosen_tw)
    for positions, want in zip(to_lists(chosen_tw), lists, strict=True):
        np.testing.assert_array_equal(positions, want)


def test_spans() -> None:
    spans = [(0, 0), (0, 31), (0, 32), (31, 32), (5, 70), (-4, 3), (0, 95), (7, 6), (0, -1), (64, 95), (90, 200)]
    first, last = np.array(spans).T
    got = to_lists(np.asarray(spans_to_bits(jnp.asarray(first), jnp.asarray(last), 3)))
    for (start, end), positions in zip(spans, got, strict=True):
        np.testing.assert_array_equal(positions, np.arange(max(start, 0), min(end, 95) + 1))


def test_a_gpu_unpacks_without_loops() -> None:
    program = jax.jit(lambda chosen: to_positions(chosen, 64)).lower(jnp.zeros((3, 9), jnp.int32)).as_text()
    assert "while" not in program

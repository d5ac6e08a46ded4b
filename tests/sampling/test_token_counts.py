"""Token counts are made on the host and kept up on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.token_counts import (
    MAX_COUNT,
    UNCOUNTED_ROW,
    add_tokens,
    count_tokens,
    in_prompt,
    output_counts,
    set_row,
    with_drafts,
)

pytestmark = pytest.mark.sampling

V = 50
NO_DRAFTS = jnp.zeros((5, 0), jnp.int32)


def test_the_host_counts_prompt_and_output_apart() -> None:
    row = jnp.asarray(count_tokens([3, 3, 7, 3, 9, 9], 3, V))
    assert row.dtype == jnp.uint16
    assert {int(i): int(output_counts(row)[i]) for i in np.flatnonzero(output_counts(row))} == {3: 1, 9: 2}
    assert set(np.flatnonzero(in_prompt(row)).tolist()) == {3, 7}


def test_embeddings_in_a_prompt_are_no_tokens() -> None:
    row = jnp.asarray(count_tokens([-1, -1, 7, 3], 3, V))
    assert set(np.flatnonzero(in_prompt(row)).tolist()) == {7}
    assert set(np.flatnonzero(output_counts(row)).tolist()) == {3}


@pytest.mark.parametrize("tokens", [[], [4]])
def test_short_histories(tokens: list[int]) -> None:
    assert output_counts(jnp.asarray(count_tokens(tokens, len(tokens), V))).sum() == 0


def test_sampled_tokens_add_up_to_what_the_host_counts() -> None:
    """Counting step by step on the device equals counting the whole list, in any order; the spare row stays zero."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, V, 4).tolist() for _ in range(3)]
    outputs = rng.integers(0, V, (20, 3))
    counts = jnp.zeros((4, V), jnp.uint16)
    for row, prompt in enumerate(prompts):
        counts = jax.jit(set_row, donate_argnums=0)(counts, jnp.int32(row + 1), count_tokens(prompt, 4, V))
    add = jax.jit(add_tokens, donate_argnums=0)
    rows = np.array([2, UNCOUNTED_ROW, 3, 1, UNCOUNTED_ROW])
    for step in outputs:
        tokens = jnp.asarray([step[1], 5, step[2], step[0], 6])
        counts = add(counts, jnp.asarray(rows), tokens, NO_DRAFTS, NO_DRAFTS)
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(counts[row + 1], count_tokens([*prompt, *outputs[:, row]], 4, V))
    assert not np.asarray(counts[UNCOUNTED_ROW]).any()


def test_tokens_after_wrong_drafts_are_not_counted() -> None:
    """Rows of one request: each has the drafts before it, and counts if all of them were sampled."""
    counts = jnp.zeros((3, V), jnp.uint16)
    # Request 1 drafted 7, 7, 8 and sampled 7, 7, 9, 4; request 2 drafted 3 and sampled 5, 6.
    rows = jnp.asarray([1, 2, 1, 1, 1, 2])
    tokens = jnp.asarray([4, 6, 7, 7, 9, 5])
    drafts = jnp.asarray([[7, 7, 8], [3, -1, -1], [-1] * 3, [7, -1, -1], [7, 7, -1], [-1] * 3])
    draft_rows = jnp.asarray([[2, 3, 4], [5, 0, 0], [0] * 3, [2, 0, 0], [2, 3, 0], [0] * 3])
    counts = add_tokens(counts, rows, tokens, drafts, draft_rows)
    np.testing.assert_array_equal(counts[1], count_tokens([7, 7, 9], 0, V))
    np.testing.assert_array_equal(counts[2], count_tokens([5], 0, V))
    assert not np.asarray(counts[UNCOUNTED_ROW]).any()


def test_drafts_are_counted_beside_the_output() -> None:
    counts = jnp.asarray(count_tokens([5, 5, 6, 7], 1, V))[None].repeat(2, axis=0)
    times = np.asarray(with_drafts(counts, jnp.asarray([[6, 6, 49], [-1, -1, -1]])))
    assert {int(i): int(times[0, i]) for i in np.flatnonzero(times[0])} == {5: 1, 6: 3, 7: 1, 49: 1}
    np.testing.assert_array_equal(times[1], output_counts(counts[1]))


def test_counts_stop_at_their_limit() -> None:
    """Counts must not reach the bit above, which belongs to the prompt."""
    full = count_tokens([1] + [2] * (MAX_COUNT + 5), 1, V)
    assert full[2] == MAX_COUNT
    counts = jnp.zeros((2, V), jnp.uint16).at[1].set(full)
    for _ in range(3):
        counts = add_tokens(counts, jnp.asarray([1]), jnp.asarray([2]), NO_DRAFTS[:1], NO_DRAFTS[:1])
    np.testing.assert_array_equal(counts[1], full)


def test_updates_are_in_place() -> None:
    counts = jax.ShapeDtypeStruct((65, 49_152), jnp.uint16)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    row = jax.ShapeDtypeStruct((49_152,), jnp.uint16)
    one = jax.ShapeDtypeStruct((), jnp.int32)
    drafts = jax.ShapeDtypeStruct((64, 5), jnp.int32)
    for function, args in ((add_tokens, (ids, ids, drafts, drafts)), (set_row, (one, row))):
        memory = jax.jit(function, donate_argnums=0).lower(counts, *args).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == 65 * 49_152 * 2
        assert memory.temp_size_in_bytes < 1_000_000

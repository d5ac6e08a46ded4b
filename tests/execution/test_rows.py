"""Each row of logits looks at the right token and gets its settings."""

from __future__ import annotations

from array import array
from functools import partial
from typing import Annotated, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxllm.execution.packing import ArrayField, BatchShape, Bucket, allocate, array_fields, unpack
from jaxllm.sampling.inputs import Packed
from jaxllm.sampling_params import SamplingParams
from tests.execution.test_batch import make_chunk, step


def test_scored_prompt_tokens_get_rows_after_the_chunks() -> None:
    """The token at position p - 1 predicts the one at p; a chunk that ends inside the prompt has the next one too."""
    params = SamplingParams(prompt_logprobs=2)
    _, arrays = step(
        make_chunk("a", 9, [50], [3, 1, 7], num_prompt_tokens=4),
        make_chunk("b", 2, [60, 61, 62, 63], [2, 9], params=params, samples=False, score_start=4,
                   scored_ids=array("i", [62, 63, 64]), num_prompt_tokens=9),
        make_chunk("c", 0, [30, 31, 32], [5], params=params, score_start=1, scored_ids=array("i", [31, 32])),
    )  # fmt: skip
    # Tokens in t: a 0; b 1..4 (positions 2..5); c 5..7.
    np.testing.assert_array_equal(arrays.logit_rows.logit_tokens_s[:8], [0, 4, 7, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(arrays.rules.is_scored_s, [0, 0, 0, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(arrays.rules.scored_ids_s[3:8], [62, 63, 64, 31, 32])
    assert arrays.logit_rows.num_rows == 8
    assert arrays.uses.logprobs == 1


def test_scored_rows_have_their_own_token_ids() -> None:
    params = SamplingParams(
        prompt_logprobs=0, logprob_token_ids=[1], prompt_logprob_token_ids=[[9, 4], [7]], prompt_logprob_start=1
    )
    chunk = make_chunk("c", 0, [30, 31, 32], [5], params=params, score_start=1, scored_ids=array("i", [31, 32, 33]))
    inputs, _ = step(chunk)
    np.testing.assert_array_equal(inputs.rare.logprob_ids_sn[:4, :3], [[1, 0, 0], [0, 0, 0], [9, 4, 0], [7, 0, 0]])


def test_penalties_count_in_the_requests_row_and_padding_is_neutral() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=1.5)
    _, arrays = step(
        make_chunk("a", 0, [1], [1], params=params, count_row=5),
        make_chunk("b", 0, [1], [2]),
        make_chunk("c", 0, [1, 2], [3], params=params, count_row=3, samples=False),
    )
    np.testing.assert_array_equal(arrays.rules.count_rows_s, [5] + [0] * 7)
    assert arrays.uses.penalties == 1
    assert [values_s[0] for values_s in arrays.rules[3:6]] == [0.5, -1.0, 1.5]
    np.testing.assert_array_equal(arrays.rules.repetition_s[1:], 1.0)
    np.testing.assert_array_equal(arrays.rules.presence_s[1:], 0.0)


def test_biases_fill_as_many_columns_as_the_longest() -> None:
    inputs, arrays = step(
        make_chunk("a", 0, [1], [1], params=SamplingParams(logit_bias={3: 1.5})),
        make_chunk("b", 0, [1], [2]),
        make_chunk("c", 0, [1], [3], params=SamplingParams(logit_bias={7: -1.0, 2: 100.0})),
    )
    assert arrays.uses.num_biases == 2
    np.testing.assert_array_equal(inputs.rare.bias_ids_sb[:3, :2], [[3, 0], [0, 0], [7, 2]])
    np.testing.assert_array_equal(inputs.rare.bias_sb[:3, :2], [[1.5, 0], [0, 0], [-1.0, 100.0]])
    assert not inputs.rare.bias_sb[:, 2:].any()


def test_arguments_of_processors_have_defaults_and_types() -> None:
    _, arrays = step(
        make_chunk("a", 0, [1], [1], params=SamplingParams(extra_args={"target": 9, "scale": 0.5})),
        make_chunk("b", 0, [1], [2]),
        extra_args=(("target", -1), ("scale", 2.0)),
    )
    np.testing.assert_array_equal(arrays.rules.extra_args["target"], [9] + [-1] * 7)
    np.testing.assert_array_equal(arrays.rules.extra_args["scale"], [0.5] + [2.0] * 7)


class Extended(NamedTuple):
    """The settings of a sampler that has one more."""

    top_k_s: Array
    typical_p_s: Annotated[Array, Packed(np.float32, 1.0)]
    pairs_s2: Array
    num_x: Array


def test_a_field_that_a_record_gets_is_packed_without_another_word() -> None:
    assert array_fields(Extended) == (
        ArrayField("s", Packed()),
        ArrayField("s", Packed(np.float32, 1.0)),
        ArrayField("s2", Packed()),
        ArrayField("", Packed()),
    )


def test_the_step_reads_what_the_host_wrote() -> None:
    """Each array of every record gets numbers of its own, through views, and comes out of traced buffers."""
    shape = BatchShape(Bucket(16, 8), 6, (4,), (None,), 1, (("target", -1), ("scale", 2.0)))
    _, ints, floats, arrays = allocate(shape)
    assert [arrays.sampling.top_p_s[0], arrays.rules.extra_args["scale"][0]] == [1.0, 2.0]
    assert not arrays.sampling.top_k_s.any()
    for number, view in enumerate(jax.tree.leaves(arrays), 1):
        view[...] = number
    assert ints.all()
    assert floats.all()
    traced = jax.jit(partial(unpack, shape=shape))(ints, floats)
    assert jax.tree.structure(traced) == jax.tree.structure(arrays)
    for got, expected in zip(jax.tree.leaves(traced), jax.tree.leaves(arrays), strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(got, expected)


def test_a_step_of_decodes_alone_has_neither_tiles_nor_chunks() -> None:
    *_, arrays = allocate(BatchShape(Bucket(8, 8), 6, (4,), (None,), 1, has_states=True))
    for decodes_only in (False, True):
        (attention,) = arrays.batches(decodes_only=decodes_only)
        states = arrays.state_batch(decodes_only=decodes_only)
        assert states is not None
        assert bool(attention.tile_seqs_i.size) == states.has_chunks == (not decodes_only)

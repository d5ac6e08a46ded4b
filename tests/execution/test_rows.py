"""Each row of logits looks at the right token and gets its settings."""

from __future__ import annotations

from array import array

import numpy as np

from jaxllm.sampling_params import SamplingParams
from tests.execution.test_batch import make_chunk, step


def test_scored_prompt_tokens_get_rows_after_the_chunks() -> None:
    """The token at position p - 1 predicts the one at p; a chunk that ends inside the prompt has the next one too."""
    params = SamplingParams(prompt_logprobs=2)
    _, ints, _ = step(
        make_chunk("a", 9, [50], [3, 1, 7], num_prompt_tokens=4),
        make_chunk("b", 2, [60, 61, 62, 63], [2, 9], params=params, samples=False, score_start=4,
                   scored_ids=array("i", [62, 63, 64]), num_prompt_tokens=9),
        make_chunk("c", 0, [30, 31, 32], [5], params=params, score_start=1, scored_ids=array("i", [31, 32])),
    )  # fmt: skip
    # Tokens in t: a 0; b 1..4 (positions 2..5); c 5..7.
    np.testing.assert_array_equal(ints["logit_tokens"][:8], [0, 4, 7, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(ints["is_scored"], [0, 0, 0, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(ints["scored_ids"][3:8], [62, 63, 64, 31, 32])
    assert ints["num_rows"] == 8
    assert ints["uses_logprobs"] == 1


def test_scored_rows_have_their_own_token_ids() -> None:
    params = SamplingParams(
        prompt_logprobs=0, logprob_token_ids=[1], prompt_logprob_token_ids=[[9, 4], [7]], prompt_logprob_start=1
    )
    chunk = make_chunk("c", 0, [30, 31, 32], [5], params=params, score_start=1, scored_ids=array("i", [31, 32, 33]))
    inputs, *_ = step(chunk)
    np.testing.assert_array_equal(inputs.rare.logprob_ids_sn[:4, :3], [[1, 0, 0], [0, 0, 0], [9, 4, 0], [7, 0, 0]])


def test_penalties_count_in_the_requests_slot_and_padding_is_neutral() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=1.5)
    _, ints, floats = step(
        make_chunk("a", 0, [1], [1], params=params, slot=4),
        make_chunk("b", 0, [1], [2]),
        make_chunk("c", 0, [1, 2], [3], params=params, slot=2, samples=False),
    )
    np.testing.assert_array_equal(ints["count_rows"], [5] + [0] * 7)
    assert ints["uses_penalties"] == 1
    assert [floats[name][0] for name in ("presence", "frequency", "repetition")] == [0.5, -1.0, 1.5]
    np.testing.assert_array_equal(floats["repetition"][1:], 1.0)
    np.testing.assert_array_equal(floats["presence"][1:], 0.0)


def test_biases_fill_as_many_columns_as_the_longest() -> None:
    inputs, ints, _ = step(
        make_chunk("a", 0, [1], [1], params=SamplingParams(logit_bias={3: 1.5})),
        make_chunk("b", 0, [1], [2]),
        make_chunk("c", 0, [1], [3], params=SamplingParams(logit_bias={7: -1.0, 2: 100.0})),
    )
    assert ints["num_biases"] == 2
    np.testing.assert_array_equal(inputs.rare.bias_ids_sn[:3, :2], [[3, 0], [0, 0], [7, 2]])
    np.testing.assert_array_equal(inputs.rare.bias_sn[:3, :2], [[1.5, 0], [0, 0], [-1.0, 100.0]])
    assert not inputs.rare.bias_sn[:, 2:].any()


def test_arguments_of_processors_have_defaults_and_types() -> None:
    _, ints, floats = step(
        make_chunk("a", 0, [1], [1], params=SamplingParams(extra_args={"target": 9, "scale": 0.5})),
        make_chunk("b", 0, [1], [2]),
        extra_args=(("target", -1), ("scale", 2.0)),
    )
    np.testing.assert_array_equal(ints["extra_args.target"], [9] + [-1] * 7)
    np.testing.assert_array_equal(floats["extra_args.scale"], [0.5] + [2.0] * 7)

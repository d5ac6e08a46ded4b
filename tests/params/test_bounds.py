"""Every field of SamplingParams is bounded: each probe is taken, or refused by name, soon and before tokenizing."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm.engine.front.input_processor import InputProcessor
from jaxllm.engine.front.params_resolver import InputLimits
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import byte_level

VOCAB = 1000
INT32 = 2**31 - 1
LONGEST = 64  # max_model_len
MAX_SECONDS = 0.05
PROMPT = "some words"
SCORED = 7  # the prompt's tokens but for the first

# Where a probe needs another field to be of any use.
TOGETHER: Mapping[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": None},
    "prompt_logprob_start": {"prompt_logprob_token_ids": [[1]] * SCORED},
}
GENERIC: Mapping[str, Any] = {
    "-1": -1,
    "2**31": 2**31,
    "2**63": 2**63,
    "1e999": math.inf,
    "nan": math.nan,
    "empty string": "",
    "empty list": [],
    "10 MB string": "x" * 10_000_000,
    "10 MB list": [1] * 1_250_000,
    "10 MB strings": ["x" * 1_250_000] * 8,
    "long number": 10**5000,
}


class Row(NamedTuple):
    """The largest values of a field that are taken, and the smallest that are not."""

    taken: tuple[Any, ...]
    refused: tuple[Any, ...]
    generic: tuple[str, ...] = ()
    """The generic probes that are taken."""


TABLE: dict[str, Row] = {
    "n": Row((1, 16_384), (0, 16_385)),
    "presence_penalty": Row((2.0, -2.0), (2.001, -2.001), ("-1",)),
    "frequency_penalty": Row((2.0, -2.0), (2.001, -2.001), ("-1",)),
    "repetition_penalty": Row((1e3, 1e-3), (1001, 1e-4, 0)),
    "temperature": Row((0, 2), (2.001, -1e-9)),
    "top_p": Row((1, 1e-30), (1.001, 0)),
    "top_k": Row((INT32, 0), (-2,), ("-1",)),
    "min_p": Row((0, 1), (1.001, -1e-9)),
    "seed": Row((2**64 - 1, -(2**63)), (2**64, -(2**63) - 1), ("-1", "2**31", "2**63")),
    "stop": Row(
        (["x" * 4096], [str(i) for i in range(256)]), (["x" * 4097], [str(i) for i in range(257)]), ("empty list",)
    ),
    "stop_token_ids": Row(([999], list(range(1000)) * 4), ([1000], [1] * 4097, [-1]), ("empty list",)),
    "ignore_eos": Row((True, False), (1, None)),
    "max_tokens": Row((1, INT32, None), (0, INT32 + 1)),
    "min_tokens": Row((0, LONGEST - 16), (LONGEST, INT32)),
    "logprobs": Row((0, 20), (21, 1000, -2)),
    "prompt_logprobs": Row((0, 20), (21, 1000, -2)),
    "logprob_token_ids": Row(([999], list(range(128))), ([1000], list(range(129)), [-1]), ("empty list",)),
    "flat_logprobs": Row((True, False), (1, None)),
    "detokenize": Row((True, False), (1, None)),
    "skip_special_tokens": Row((True, False), (1, None)),
    "spaces_between_special_tokens": Row((True, False), (1, None)),
    "include_stop_str_in_output": Row((True, False), (1, None)),
    "output_kind": Row(tuple(RequestOutputKind), (0, "DELTA")),
    "stream_interval": Row((1, INT32), (0, INT32 + 1)),
    "skip_clone": Row((True, False), (1, None)),
    "structured_outputs": Row((StructuredOutputsParams(regex="a+"),), ({}, "a+")),
    "logit_bias": Row(
        ({999: 1e30}, {str(i): 1.0 for i in range(1000)}),
        ({1000: 1.0}, dict.fromkeys(range(1025), 1.0), {-1: 1.0}, {1: math.nan}, {1: math.inf}, {"1e3": 1.0}),
    ),
    "allowed_token_ids": Row(([999], list(range(1000)) * 300), ([1000], [1] * 300_001, [-1])),
    "extra_args": Row(
        ({"scale": 3e38, "shift": -INT32 - 1}, {}), ({"scale": math.nan}, {"shift": 0.5}, {"other": 2**64})
    ),
    "watermarking": Row((None, False), (True,)),
    "routed_experts_prompt_start": Row((0,), (1,)),
    "bad_words": Row((["x" * 500], ["ab"] * 128), (["x" * 4097], ["a"] * 129, ["ab " * 600]), ("empty list",)),
    "skip_reading_prefix_cache": Row((True, False, None), (1,)),
    "thinking_token_budget": Row((0, INT32), (-2, INT32 + 1), ("-1",)),
    "repetition_detection": Row((RepetitionDetectionParams(1024, 1024, INT32),), ({"min_count": 2},)),
    "prompt_logprob_token_ids": Row(
        ([[999]] * SCORED, [list(range(20))] * SCORED, [[1, 1]] * SCORED, np.array([[-1, 1]] * SCORED)),
        ([[1000]], [list(range(21))], [list(range(129))], [[-2]], [[1]] * LONGEST, np.array([1]), np.array([[0.5]])),
    ),
    "prompt_logprob_start": Row((0,), (LONGEST, INT32)),
    "trace_decode_token_ids": Row((None,), ([1],)),
}


class Watched(Tokenizer):
    """Knows whether it was given the prompt."""

    seen = False

    def encode(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        self.seen = self.seen or PROMPT in texts
        return super().encode(texts, **options)


@cache
def tokenizer() -> Watched:
    return Watched.of(byte_level().hf)


@pytest.fixture(scope="module")
def inputs() -> InputProcessor:
    limits = InputLimits(
        vocab_size=VOCAB,
        max_model_len=LONGEST,
        max_logprobs=20,
        priorities=False,
        has_thinking_tokens=True,
        extra_args={"scale": 1.0, "shift": 0},
    )
    return InputProcessor(tokenizer(), limits, {}, seed=0)


def refusal(inputs: InputProcessor, name: str, value: Any) -> VLLMValidationError | None:
    """Return the error that a value gets, in time and before the prompt is tokenized, or None if it is taken."""
    tokenizer().seen = False
    try:
        inputs.process("r", PROMPT, SamplingParams(**{**TOGETHER.get(name, {}), name: value}))
    except VLLMValidationError as error:
        assert not tokenizer().seen, "refused, but after the prompt was tokenized"
        return error
    return None


def timed_refusal(inputs: InputProcessor, name: str, value: Any) -> VLLMValidationError | None:
    """Return the error and the time: this thread's alone, and the best of three, against noise."""
    seconds: list[float] = []
    gc.disable()
    try:
        for _ in range(3):
            start = time.thread_time()
            error = refusal(inputs, name, value)
            seconds.append(time.thread_time() - start)
            if seconds[-1] < MAX_SECONDS:
                return error
    finally:
        gc.enable()
    raise AssertionError(f"{name} took {min(seconds):.3f} s")


def test_every_field_has_a_row() -> None:
    internal = {"output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids"}
    assert set(TABLE) == set(SamplingParams.__struct_fields__) - internal


@pytest.mark.parametrize("name", TABLE)
def test_the_largest_values_are_taken(inputs: InputProcessor, name: str) -> None:
    for value in TABLE[name].taken:
        assert timed_refusal(inputs, name, value) is None


@pytest.mark.parametrize("name", TABLE)
def test_larger_ones_are_refused_by_name(inputs: InputProcessor, name: str) -> None:
    for value in TABLE[name].refused:
        error = timed_refusal(inputs, name, value)
        assert error is not None, value
        assert error.parameter == name
        assert name in str(error)
        assert len(str(error)) < 400


@pytest.mark.parametrize("name", TABLE)
def test_hostile_values(inputs: InputProcessor, name: str) -> None:
    taken = []
    for probe, value in GENERIC.items():
        error = timed_refusal(inputs, name, value)
        if error is None:
            taken.append(probe)
            continue
        assert error.parameter == name, probe
        assert name in str(error)
        assert len(str(error)) < 400
    assert tuple(taken) == TABLE[name].generic


def test_internal_fields_are_not_taken_from_users(inputs: InputProcessor) -> None:
    """Internal fields would reach the masks, which are as wide as the logits."""
    params = SamplingParams(_eos_token_id=10**9, _all_stop_token_ids={10**9}, _bad_words_token_ids=[[10**9]])
    resolved = inputs.process("r", PROMPT, params).params
    assert (resolved.eos_token_id, resolved.all_stop_token_ids, resolved.bad_words_token_ids) == (0, {0}, None)

"""SamplingParams is vLLM's, field for field; every bad value is an error that names its field."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.exceptions import UnknownParameterError, VLLMValidationError
from jaxllm.params.limits import MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from jaxllm.params.sampling_rules import GONE, REFUSED
from jaxllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

# vLLM's fields in vLLM's order with vLLM's defaults, as given to the constructor.
VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "watermarking": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "stream_interval": None,
    "skip_clone": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": None,
    "skip_reading_prefix_cache": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
}
INTERNAL = ("output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids")
# What vLLM turns the defaults into as well.
NORMALISED = {"stop": [], "stop_token_ids": [], "bad_words": [], "skip_reading_prefix_cache": False}

HUGE = 10**5000
NAN, INF = math.nan, math.inf
BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (0, -1, 16_385, 2**63, HUGE, True, 1.0, "2", None, NAN),
    "presence_penalty": (2.1, -2.1, NAN, INF, "0", None, True),
    "frequency_penalty": (2.1, -2.1, NAN, -INF, "0", None),
    "repetition_penalty": (0, -1.0, 1e-300, 1e300, NAN, INF, "1", None),
    "temperature": (-0.1, 2.1, NAN, INF, HUGE, [HUGE], "1", None, False, np.array(0.5)),
    "top_p": (0, 0.0, 1.1, -1, NAN, "1", None, True),
    "top_k": (-2, 2**31, 2**63, HUGE, 1.0, "1", None, True, NAN),
    "min_p": (-0.1, 1.1, NAN, "0", None),
    "seed": (2**64, -(2**63) - 1, HUGE, 1.5, "1", True),
    "stop": ("", [""], [1], 5, ["a", None], {"a": 1}, b"a", "x" * (MAX_STOP_LENGTH + 1), "x" * 10_000_000, "\ud800"),
    "stop_token_ids": (np.array(1), [-1], [2**31], [2**63], [HUGE], [1.0], ["1"], [True], 5, "", "12", {1: 2}),
    "ignore_eos": (1, 0, None, "true"),
    "max_tokens": (0, -1, 2**31, 2**63, 1.0, NAN, "16", True),
    "min_tokens": (-1, 17, 2**31, 2**63, 1.0, None, True),
    "logprobs": (-2, 2**31, 2**63, 1.0, "1", False),
    "prompt_logprobs": (-2, 1.0, "1"),
    "logprob_token_ids": ([-1], [1.5], 3, [2**31], list(range(129))),
    "detokenize": (1, None),
    "skip_special_tokens": (1, None),
    "spaces_between_special_tokens": (1, None),
    "include_stop_str_in_output": (1, None),
    "flat_logprobs": (1, None),
    "skip_clone": (1, None),
    "output_kind": (0, "DELTA", None),
    "stream_interval": (0, -1, 1.5, 2**63),
    "structured_outputs": ({"json": {}}, "json"),
    "logit_bias": ([1], {"a": 1.0}, {1: NAN}, {1: "x"}, {-1: 1.0}, {1: 1.1e30}, dict.fromkeys(range(1025), 1.0)),
    "allowed_token_ids": ([-1], 3, ["a"], [], [[1]], {1: 2}),
    "extra_args": ([1], "x", {1: 2}, {"a": 2**64}, {"a": [-(2**63) - 1]}, {"a": object()}, {"a": "\ud800"}),
    "watermarking": (True, 0, "no"),
    "routed_experts_prompt_start": (1, -1, 1.5, None, False),
    "bad_words": (
        [""],
        [" "],
        [1],
        "word",
        ["a" + str(i) for i in range(129)],
        ["ab" * 2000 + str(i) for i in range(9)],
        ["\ud800"],
    ),
    "skip_reading_prefix_cache": (1, "yes"),
    "thinking_token_budget": (-2, 1.5, True),
    "repetition_detection": ({"min_count": 2}, 3),
    "prompt_logprob_token_ids": ([[-2]], 3, [], [1, 1], [[]], [[1], [0.5]], [[1], [True]], [list(range(129))], ["1"]),
    "prompt_logprob_start": (-1, 1.5, 1),
    "trace_decode_token_ids": (3, [1]),
}


def test_fields_order_and_defaults_are_those_of_vllm():
    names = list(SamplingParams.__struct_fields__)
    assert names == [*VLLM_DEFAULTS, *INTERNAL]
    defaults = dict(zip(names, SamplingParams.__struct_defaults__, strict=True))
    assert {name: defaults[name] for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS | NORMALISED


def test_positional_arguments_follow_vllm():
    params = SamplingParams(2, 0.0, 0.0, 1.0, 0.5, None, 0.9, 40, 0.1, 7, "END")
    assert (params.n, params.temperature, params.top_p, params.top_k) == (2, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, params.stop) == (0.1, 7, ["END"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, values in BAD_VALUES.items()
        for i, value in enumerate(values)
    ],
)
def test_bad_values_name_their_field(name: str, value: Any):
    with pytest.raises(VLLMValidationError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 400


def test_every_field_has_bad_values():
    assert set(BAD_VALUES) == set(VLLM_DEFAULTS)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16_384},
        {"temperature": 2.0},
        {"temperature": 1},
        {"top_p": 1e-9},
        {"top_k": 2**31 - 1},
        {"min_p": 1},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"stop": ["a"]},
        {"stop": ("a", "b")},
        {"stop": []},
        {"stop": [f"{i}" for i in range(MAX_STOP_STRINGS)]},
        {"stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))},
        {"stop_token_ids": np.array([1, 2])},
        {"max_tokens": 2**31 - 1},
        {"max_tokens": None},
        {"max_tokens": None, "min_tokens": 2**31 - 1},
        {"logprobs": -1},
        {"logprobs": 0},
        {"detokenize": False, "stop_token_ids": [3]},
        {"top_k": np.int64(3), "top_p": np.float32(0.5), "temperature": np.float64(0.5)},
        {"stop": None, "stop_token_ids": None, "logprobs": None, "seed": None, "bad_words": None},
        {"presence_penalty": -2.0, "frequency_penalty": 2, "repetition_penalty": 1e3},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": True, "flat_logprobs": True},
        {"logprob_token_ids": list(range(128)), "logprobs": 128},
        {"logprob_token_ids": []},
        {"prompt_logprob_token_ids": [list(range(128))], "prompt_logprob_start": 5},
        {"prompt_logprob_token_ids": np.array([[1, -1], [2, 3]], np.int32)},
        {"spaces_between_special_tokens": False, "stream_interval": 2**31 - 1},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
        {"logit_bias": dict.fromkeys(range(1024), -1e30)},
        {"logit_bias": {"12": 3}},
        {"logit_bias": {}},
        {"allowed_token_ids": np.arange(300_000)},
        {"extra_args": {"a": 1, "b": 0.5, "c": "text", "d": {"e": [True, None, [2**63]]}}},
        {"watermarking": False},
        {"stop": np.array(["a", "b"])},
        {"bad_words": ("a", "b" * 4096)},
        {"skip_reading_prefix_cache": True},
        {"thinking_token_budget": 0},
        {"repetition_detection": RepetitionDetectionParams(1024, 0, 2)},
        *({name: value} for name, (taken, _) in REFUSED.items() for value in taken),
    ],
)
def test_good_values(fields: dict[str, Any]):
    params = SamplingParams(**fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value"), [("watermarking", True), ("routed_experts_prompt_start", 1), ("trace_decode_token_ids", [1])]
)
def test_fields_without_a_meaning_are_refused_with_the_reason(name: str, value: Any):
    assert set(REFUSED) == {"watermarking", "routed_experts_prompt_start", "trace_decode_token_ids"}
    with pytest.raises(VLLMValidationError, match=f"^{name}=.* is not supported: {REFUSED[name][1][:10]}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_the_prefix_cache_is_not_read_where_the_prompt_is_scored():
    assert SamplingParams().skip_reading_prefix_cache is False
    asked: list[dict[str, Any]] = [{"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[1]]}]
    for fields in asked:
        assert SamplingParams(**fields).skip_reading_prefix_cache is True
        with pytest.raises(VLLMValidationError, match="Leave it out") as caught:
            SamplingParams(**fields, skip_reading_prefix_cache=False)
        assert caught.value.parameter == "skip_reading_prefix_cache"


def test_what_is_scored():
    assert SamplingParams().first_scored_position is None
    assert SamplingParams(prompt_logprobs=0).first_scored_position == 1
    assert SamplingParams(prompt_logprob_token_ids=[[3]]).first_scored_position == 1
    asked: dict[str, Any] = {"prompt_logprob_token_ids": [[3], [4, 5]], "prompt_logprob_start": 4}
    assert SamplingParams(**asked).first_scored_position == 5
    assert SamplingParams(**asked, prompt_logprobs=0).first_scored_position == 1
    assert [SamplingParams(**asked).prompt_ids_at(each) for each in (4, 5, 6)] == [None, [3, -1], [4, 5]]
    assert SamplingParams(prompt_logprobs=0).prompt_ids_at(1) is None
    assert SamplingParams().num_logprobs is None
    assert SamplingParams(logprobs=0).num_logprobs == 0
    assert SamplingParams(logprob_token_ids=[4, 5]).num_logprobs == 2
    assert SamplingParams(logprob_token_ids=[4, 5], logprobs=2).num_logprobs == 2
    for count in (-1, 0, 3):
        with pytest.raises(VLLMValidationError, match=r"logprobs must equal len\(logprob_token_ids\)"):
            SamplingParams(logprob_token_ids=[4, 5], logprobs=count)


@pytest.mark.parametrize("name", ["best_of", "guided_decoding", "logits_processors", "truncate_prompt_tokens"])
def test_gone_fields_say_what_to_use(name: str):
    fields: dict[str, Any] = {name: 1}
    with pytest.raises(UnknownParameterError, match=name) as caught:
        SamplingParams(**fields)
    assert caught.value.parameter == name
    assert GONE[name] in str(caught.value)


def test_unknown_field_is_a_type_error_with_a_suggestion():
    with pytest.raises(TypeError, match=r"'temprature'.*'temperature'"):
        SamplingParams.from_optional(temprature=0.5)


@pytest.mark.parametrize("temperature", [0, 0.0])
def test_greedy_resets_the_filters(temperature: float):
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=5, min_p=0.5, n=3, seed=1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert params.sampling_type is SamplingType.GREEDY
    assert params.n == 3


@pytest.mark.parametrize("temperature", [1e-9, 9.9e-6, 1e-5, 5e-3])
def test_low_temperatures_are_raised_with_a_warning(temperature: float, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=temperature, top_p=0.5)
    assert (params.temperature, params.top_p) == (0.01, 0.5)
    assert "0.01" in caplog.text
    assert params.sampling_type is SamplingType.RANDOM
    assert SamplingParams(temperature=0.01, seed=3).sampling_type is SamplingType.RANDOM_SEED


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be less than or equal to max_tokens=4, got 5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be non-negative, got -0.1"),
        ({"temperature": 2.5}, r"temperature must be in \[0, 2\], got 2.5"),
        ({"temperature": NAN}, "temperature must be a finite number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": -2}, r"top_k must be 0 \(disable\), or at least 1, got -2"),
        ({"presence_penalty": 3}, r"presence_penalty must be in \[-2, 2\], got 3"),
        ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be non-negative or -1, got -2"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must contain only integers, got 'a'"),
        ({"stop": [""]}, "stop cannot contain an empty string"),
        ({"stop": "a", "detokenize": False}, "stop strings are only supported when detokenize is True. Set detokenize"),
        ({"thinking_token_budget": -2}, "thinking_token_budget must be a non-negative integer or -1 for unlimited"),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty"),
    ],
)
def test_refusals_are_in_vllms_words(fields: dict[str, Any], words: str):
    with pytest.raises(VLLMValidationError, match=words):
        SamplingParams(**fields)


def test_normalisations():
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(logit_bias={3: 250.0, 4: -1e4}).logit_bias == {3: 250.0, 4: -1e4}
    assert SamplingParams(extra_args={"a": (1, {"b": ()})}).extra_args == {"a": [1, {"b": []}]}
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == [3, 1]
    assert type(SamplingParams(temperature=1).temperature) is float
    assert SamplingParams(stop_token_ids=[3, 1]).all_stop_token_ids == {1, 3}


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"stop": "END"}, 2),
        ({"stop": ["a", "abcd", "ab"]}, 3),
        ({"stop": "a"}, 0),
        ({}, 0),
        ({"stop": "END", "include_stop_str_in_output": True}, 0),
        ({"output_text_buffer_length": 9}, 0),
    ],
)
def test_output_text_buffer_length(fields: dict[str, Any], length: int):
    assert SamplingParams(**fields).output_text_buffer_length == length


def test_stop_strings_need_text():
    with pytest.raises(VLLMValidationError, match="detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


def test_from_optional_takes_none_for_defaults():
    nothing = dict.fromkeys(VLLM_DEFAULTS) | {"max_tokens": 16}
    assert SamplingParams.from_optional(**nothing) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(temperature=0.5, stop="x").stop == ["x"]


def test_clone_is_deep_and_checks_again():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    copied = params.clone()
    assert copied == params
    assert copied is not params
    for name in ("stop", "stop_token_ids", "_all_stop_token_ids", "bad_words"):
        assert getattr(copied, name) is not getattr(params, name)
    params.temperature = 5.0
    with pytest.raises(VLLMValidationError, match="temperature"):
        params.clone()
    shared = SamplingParams(skip_clone=True)
    assert shared.clone() is shared


def test_update_from_generation_config():
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 5]}, eos_token_id=2)
    assert params.eos_token_id == 2
    assert params.stop_token_ids == [5, 9]
    assert params.all_stop_token_ids == {2, 5, 9}
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({"eos_token_id": 5}, eos_token_id=2)
    assert ignoring.eos_token_id is None
    assert ignoring.stop_token_ids == []
    assert ignoring.all_stop_token_ids == {2, 5}


def test_msgpack_keeps_what_the_engine_resolved():
    params = SamplingParams(n=3, temperature=0.7, top_p=0.9, seed=5, stop="END", output_kind=RequestOutputKind.DELTA)
    params.update_from_generation_config({"eos_token_id": [2, 5]}, eos_token_id=2)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    assert decoded.all_stop_token_ids == {2, 5}
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301 (our own bytes)


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 100),
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(-1, 2**31 - 1),
        min_p=st.floats(0, 1),
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
        stop=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=4),
        stop_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1)),
        max_tokens=st.none() | st.integers(20, 2**31 - 1),
        min_tokens=st.integers(0, 20),
        logprobs=st.none() | st.integers(-1, 100),
        output_kind=st.sampled_from(RequestOutputKind),
    )
)
def test_round_trip_changes_nothing(params: SamplingParams):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params


def test_errors_survive_pickling():
    with pytest.raises(VLLMValidationError) as caught:
        SamplingParams(n=0)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 (our own bytes)
    assert (str(again), again.parameter, again.value) == (str(caught.value), "n", 0)

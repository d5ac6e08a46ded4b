"""The params of structured outputs, repetition detection and beam search are checked when made."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import BeamSearchParams, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    "fields", [{}, {"json": "{}", "regex": "a"}, {"regex": ""}, {"choice": [""]}, {"choice": "ab"}, {"grammar": 3}]
)
def test_structured_outputs_take_exactly_one_constraint(fields: dict[str, Any]):
    with pytest.raises(VLLMValidationError):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize("depth", [101, 300, 2000])
def test_schemas_too_deep_to_copy_are_refused(depth: int):
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    with pytest.raises(VLLMValidationError, match="100 levels of nesting"):
        StructuredOutputsParams(json=schema)
    while depth > 100:
        schema, depth = schema["items"], depth - 1
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)).clone() is not None


def test_a_backend_of_structured_outputs_is_ignored_aloud(caplog: pytest.LogCaptureFixture):
    fields: dict[str, Any] = {"regex": "a", "backend": "xgrammar"}
    unknown: dict[str, Any] = {"regex": "a", "backends": "x"}
    assert StructuredOutputsParams(**fields) == StructuredOutputsParams(regex="a")
    assert caplog.messages == ["StructuredOutputsParams(backend='xgrammar') is ignored: llguidance does the work."]
    with pytest.raises(TypeError, match="back"):
        StructuredOutputsParams(**unknown)


def test_structured_outputs():
    params = StructuredOutputsParams(choice=["a", "b"])
    assert not params.all_constraints_none()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params


@pytest.mark.parametrize("fields", [{"max_pattern_size": -1}, {"min_pattern_size": 2}, {"max_pattern_size": 3}])
def test_repetition_detection_checks(fields: dict[str, Any]):
    with pytest.raises(VLLMValidationError):
        RepetitionDetectionParams(**fields)


def test_repetition_detection_is_checked_again():
    params = SamplingParams(repetition_detection=RepetitionDetectionParams(3, 1, 2))
    assert params.repetition_detection is not None
    params.repetition_detection.max_pattern_size = 10**9
    with pytest.raises(VLLMValidationError, match="max_pattern_size"):
        params.clone()


def test_beam_search_params():
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)
    assert (params.skip_special_tokens, params.watermarking) == (True, None)
    wrong = (
        {"beam_width": 0},
        {"max_tokens": 0},
        {"temperature": math.nan},
        {"length_penalty": math.inf},
        {"length_penalty": 33},
        {"skip_special_tokens": None},
        {"watermarking": True},
    )
    for fields in wrong:
        with pytest.raises(VLLMValidationError, match=next(iter(fields))):
            BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **fields})

"""SamplingParams are checked against the model and completed before any prompt is tokenized."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.config.groups import StructuredOutputsConfig
from jaxllm.engine.front.input_processor import GRAMMAR_SECONDS, InputProcessor
from jaxllm.engine.front.params_resolver import InputLimits
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import SamplingParams, StructuredOutputsParams
from jaxllm.text.reasoning import thinking_tokens
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import byte_fallback, byte_level, make_ready


def processor(
    tokenizer: Tokenizer | None, generation_config: dict[str, Any] | None = None, check: Any = None, **limits: Any
) -> InputProcessor:
    fields: dict[str, Any] = {"vocab_size": 400, "max_model_len": 32, "max_logprobs": 20, "priorities": False}
    return InputProcessor(tokenizer, InputLimits(**(fields | limits)), generation_config or {}, 7, check)


def resolved(inputs: InputProcessor, **fields: Any) -> SamplingParams:
    return inputs.process("r", [1, 2], SamplingParams(**fields)).params


@pytest.mark.parametrize(
    "name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids", "prompt_logprob_token_ids"]
)
def test_ids_are_below_the_logits_width(tokenizer: Tokenizer, name: str) -> None:
    def value(token_id: int) -> Any:
        if name == "logit_bias":
            return {3: 1.0, token_id: 1.0}
        return [[3, token_id]] if name == "prompt_logprob_token_ids" else [3, token_id]

    resolved(processor(tokenizer), **{name: value(399)})
    with pytest.raises(VLLMValidationError, match=f"^params: .*{name} .*out-of-vocab token id.* size: 400") as error:
        resolved(processor(tokenizer), **{name: value(400)})
    assert (error.value.parameter, error.value.value) == (name, 400)


def test_one_bad_request_refuses_the_batch_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = processor(tokenizer)
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **_options: pytest.fail("tokenized"))
    with pytest.raises(VLLMValidationError, match=r"^sampling_params\[1\]: .*logit_bias"):
        inputs.process_batch(["0", "1"], ["a", "b"], [SamplingParams(), SamplingParams(logit_bias={400: 1})])
    with pytest.raises(VLLMValidationError, match=r"^prompts\[1\]: Token id 400"):
        inputs.process_batch(["0", "1"], ["a", [400]], [SamplingParams()] * 2)


def test_limits_of_log_probabilities(tokenizer: Tokenizer) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"logprobs": -1}, "Requested sample logprobs of 400, which is greater than max allowed: 20"),
        ({"prompt_logprobs": 21}, "Requested prompt logprobs of 21, which is greater than max allowed: 20"),
        ({"prompt_logprobs": -1}, "Requested prompt logprobs of 400"),
        ({"prompt_logprob_token_ids": [list(range(21))]}, "Requested 21 token ids per row in prompt_logprob"),
    ]
    for fields, match in asked:
        with pytest.raises(VLLMValidationError, match=match) as error:
            resolved(processor(tokenizer), **fields)
        assert [error.value.parameter] == list(fields)
        resolved(processor(tokenizer, max_logprobs=400), **fields)
    resolved(processor(tokenizer), logprob_token_ids=list(range(128)))
    for start, num_scored in ((0, 1), (1, 0), (2, 0)):
        message = f"prompt_logprob_token_ids has 2 rows, but the prompt has {num_scored} scored rows"
        with pytest.raises(VLLMValidationError, match=message):
            resolved(processor(tokenizer), prompt_logprob_token_ids=[[1], [1]], prompt_logprob_start=start)


def test_bad_words_in_both_spellings(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode([text], add_special_tokens=False)[0]

    assert len(ids("hello")) == len(ids(" world")) == 1
    assert ids(" hello")[0] != ids("hello")[0]
    assert resolved(processor(tokenizer), bad_words=["hello"]).bad_words_token_ids == [ids("hello"), ids(" hello")]
    # A leading space changes nothing; a spelling of another length is left out, as in vLLM.
    assert resolved(processor(tokenizer), bad_words=["  hello"]).bad_words_token_ids == [ids("hello"), ids(" hello")]
    assert len(ids(" Q")) == 2
    assert resolved(processor(tokenizer), bad_words=["Q"]).bad_words_token_ids == [ids("Q")]
    assert resolved(processor(tokenizer)).bad_words_token_ids is None


def test_bad_words_are_bounded(tokenizer: Tokenizer) -> None:
    with pytest.raises(VLLMValidationError, match="at most 1024 tokens together, got 1025") as error:
        resolved(processor(tokenizer), bad_words=["Q" * 1025])
    assert error.value.parameter == "bad_words"
    with pytest.raises(VLLMValidationError, match="which the model lacks"):
        resolved(processor(tokenizer, vocab_size=20), bad_words=["hello"])


def test_ids_that_the_model_lacks_end_nothing(tokenizer: Tokenizer) -> None:
    params = resolved(processor(tokenizer, {"eos_token_id": [0, 5, 400]}), stop_token_ids=[9])
    assert (params.stop_token_ids, params.all_stop_token_ids) == ([5, 9], {0, 5, 9})


@pytest.mark.parametrize("name", ["stop", "bad_words", "structured_outputs"])
def test_what_needs_a_tokenizer(name: str) -> None:
    value = StructuredOutputsParams(regex="a") if name == "structured_outputs" else ["a"]
    with pytest.raises(VLLMValidationError, match=r"needs? a tokenizer; use .*`skip_tokenizer_init=True`") as error:
        resolved(processor(None), **{name: value})
    assert error.value.parameter == name


def test_thinking_budget_needs_to_know_the_marks(tokenizer: Tokenizer) -> None:
    with pytest.raises(VLLMValidationError, match="reasoning_config") as error:
        resolved(processor(tokenizer), thinking_token_budget=3)
    assert error.value.parameter == "thinking_token_budget"
    known = processor(tokenizer, has_thinking_tokens=True)
    assert resolved(known, thinking_token_budget=3).thinking_token_budget == 3
    assert resolved(processor(tokenizer), thinking_token_budget=-1).thinking_token_budget is None


def test_extra_args_are_those_of_the_processors(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer, extra_args={"scale": 1.0, "shift": 2})
    params = SamplingParams(extra_args={"scale": 3, "shift": 4})
    args = inputs.process("r", [1], params).params.extra_args
    assert args == {"scale": 3.0, "shift": 4}
    assert args is not None
    assert [type(value) for value in args.values()] == [float, int]
    assert params.extra_args == {"scale": 3, "shift": 4}
    with pytest.raises(VLLMValidationError, match=r"extra_args\['shift'\] must be an integer") as error:
        resolved(inputs, extra_args={"shift": 0.5})
    assert error.value.parameter == "extra_args"
    others = {"shift": 1, "mine": {"a": ["b", None]}}
    assert resolved(inputs, extra_args=others).extra_args == others
    assert resolved(processor(tokenizer), extra_args=others).extra_args == others
    assert resolved(processor(tokenizer), extra_args={}).extra_args == {}


def test_stream_interval_is_at_least_the_engine_s(tokenizer: Tokenizer) -> None:
    for asked, engine, expected in ((None, 1, 1), (None, 4, 4), (2, 4, 4), (8, 4, 8)):
        inputs = processor(tokenizer, stream_interval=engine)
        assert resolved(inputs, stream_interval=asked).stream_interval == expected


def test_grammars_are_checked_with_the_engine_s_settings(tokenizer: Tokenizer) -> None:
    seen: list[StructuredOutputsParams | None] = []

    def see(params: SamplingParams, _: float | None) -> None:
        seen.append(params.structured_outputs)

    compact = StructuredOutputsConfig(disable_any_whitespace=True)
    inputs = processor(tokenizer, check=see, structured_outputs=compact)
    schema = StructuredOutputsParams(json={"type": "object"})
    result = resolved(inputs, structured_outputs=schema)
    assert [each is not None and each.disable_any_whitespace for each in seen] == [True]
    assert result.structured_outputs == seen[0]
    assert not schema.disable_any_whitespace
    resolved(inputs, structured_outputs=StructuredOutputsParams(regex="a"))  # takes no such setting
    assert resolved(inputs).structured_outputs is None
    assert len(seen) == 2

    waits: list[float | None] = []

    def refuse(params: SamplingParams, seconds: float | None) -> None:
        waits.append(seconds)
        if seconds == 0:
            return  # as the core does
        raise VLLMValidationError("regex: unbalanced parenthesis.", parameter="structured_outputs", value="(")

    inputs = processor(tokenizer, check=refuse)
    params = [SamplingParams(), SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))]
    with pytest.raises(VLLMValidationError, match=r"^sampling_params\[1\]: regex: unbalanced") as error:
        inputs.process_batch(["0", "1"], ["a", "b"], params)
    assert (error.value.parameter, error.value.value) == ("structured_outputs", "(")
    with pytest.raises(VLLMValidationError, match="params: regex: unbalanced"):
        inputs.process("2", "a", params[1])
    inputs.process("3", "a", params[1], grammar_seconds=0)  # the core alone refuses it
    assert waits == [None, GRAMMAR_SECONDS, 0], "one request among others that run does not wait long"


@pytest.mark.parametrize(("backend", "closes"), [("auto", True), ("guidance", False)])
def test_objects_are_closed_as_the_engine_s_settings_say(tokenizer: Tokenizer, backend: str, closes: bool) -> None:
    inputs = processor(tokenizer, structured_outputs=StructuredOutputsConfig(backend=backend))
    kinds: tuple[dict[str, Any], ...] = ({"json": {"type": "object"}}, {"structural_tag": "{}"})
    for kind in kinds:
        constraint = resolved(inputs, structured_outputs=StructuredOutputsParams(**kind)).structured_outputs
        assert constraint is not None
        assert constraint.disable_additional_properties is closes


def test_params_that_are_not_cloned_are_not_changed_either(tokenizer: Tokenizer) -> None:
    inputs = processor(
        tokenizer,
        {"eos_token_id": [5]},
        stream_interval=3,
        extra_args={"a": 1.0},
        structured_outputs=StructuredOutputsConfig(disable_any_whitespace=True),
    )
    constraint = StructuredOutputsParams(json_object=True)
    params = SamplingParams(
        skip_clone=True, n=2, bad_words=["hello"], extra_args={"a": 1}, prompt_logprobs=1, structured_outputs=constraint
    )
    before = repr(params), params.bad_words_token_ids, set(params.all_stop_token_ids)
    inputs.process("r", [1, 2], params)
    assert (repr(params), params.bad_words_token_ids, params.all_stop_token_ids) == before


def test_marks_of_reasoning(tokenizer: Tokenizer) -> None:
    def marks(tokenizer: Tokenizer | None, chosen: tuple[str, str] | None = None) -> Any:
        tokens = thinking_tokens(chosen, tokenizer)
        return None if tokens is None else (tokens.start_ids, tokens.end_ids)

    assert marks(tokenizer) is None
    assert marks(None) is None
    thinking = byte_level()
    thinking.backend.add_tokens(["<think>", "</think>"])
    ids = (thinking.backend.token_to_id("<think>"),), (thinking.backend.token_to_id("</think>"),)
    assert marks(thinking) == ids
    half = byte_level()
    half.backend.add_tokens(["<think>"])
    assert marks(half) is None
    chosen = ("hello", "the END")
    start, end = thinking.encode(chosen)
    assert marks(thinking, chosen) == (tuple(start), tuple(end))
    with pytest.raises(VLLMValidationError, match="reasoning_config needs a tokenizer"):
        marks(None, chosen)
    empty = byte_fallback()
    empty.encode = lambda *_, **_options: [[], [1]]
    with pytest.raises(VLLMValidationError, match="makes no token"):
        marks(empty, chosen)


def test_limits_of_an_engine() -> None:
    compact = StructuredOutputsConfig(disable_any_whitespace=True)
    ready = make_ready(
        max_model_len=77,
        extra_args={"by": 2.0},
        stream_interval=3,
        policy="priority",
        has_thinking_tokens=True,
        has_validators=True,
        structured_outputs_config=compact,
    )
    limits = InputLimits.of(ready)
    assert (limits.vocab_size, limits.max_model_len, limits.max_logprobs) == (1000, 77, 20)
    assert (limits.priorities, limits.stream_interval, limits.has_thinking_tokens) == (True, 3, True)
    assert (limits.extra_args, limits.has_validators, limits.structured_outputs) == ({"by": 2.0}, True, compact)
    usual = InputLimits.of(make_ready())
    assert (usual.priorities, usual.has_thinking_tokens, usual.has_validators) == (False, False, False)


def test_classes_of_logits_processors_look_at_the_params(tokenizer: Tokenizer) -> None:
    """The core is asked only if it has such classes, and what it says gets the argument's name."""

    def refuse(params: SamplingParams, seconds: float | None) -> None:
        raise VLLMValidationError(f"Mine refuses them: {params.extra_args}.", parameter="logits_processors", value=3)

    resolved(processor(tokenizer, check=refuse), extra_args={"a": 1})
    inputs = processor(tokenizer, check=refuse, has_validators=True)
    with pytest.raises(VLLMValidationError, match=r"^params: Mine refuses them: \{'a': 1\}\.$") as error:
        resolved(inputs, extra_args={"a": 1})
    assert (error.value.parameter, error.value.value) == ("logits_processors", 3)
    resolved(processor(tokenizer, has_validators=True), extra_args={"a": 1})  # nobody to ask

"""Requests are completed with defaults, or refused with the argument's name before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm.core_messages import sequence_ids, split
from jaxllm.engine.front.input_processor import InputProcessor, mix
from jaxllm.engine.front.params_resolver import InputLimits
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.prompts import ParsedPrompt, is_single_prompt
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import byte_level


def processor(tokenizer: Tokenizer | None, generation_config: dict[str, Any] | None = None, **limits: Any):
    fields: dict[str, Any] = {"vocab_size": 1000, "max_model_len": 32, "max_logprobs": 20, "priorities": False}
    return InputProcessor(tokenizer, InputLimits(**(fields | limits)), generation_config or {}, seed=7)


@pytest.mark.parametrize(
    "prompt",
    ["hello", {"prompt": "hello"}, [5, 6, 7], {"prompt_token_ids": [5, 6, 7]}, (5, 6, 7), np.array([5, 6, 7])],
)
def test_forms_of_a_prompt(tokenizer: Tokenizer, prompt: Any) -> None:
    request = processor(tokenizer).process("r", prompt, SamplingParams())
    text = isinstance(prompt, str) or (isinstance(prompt, dict) and "prompt" in prompt)
    assert request.prompt == ("hello" if text else None)
    assert request.prompt_token_ids == (tokenizer.encode(["hello"])[0] if text else [5, 6, 7])
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)


def test_text_of_a_token_prompt_is_passed_through(tokenizer: Tokenizer) -> None:
    prompt = {"prompt": "shown", "prompt_token_ids": [1, 2], "cache_salt": "mine"}
    request = processor(tokenizer).process("r", prompt, SamplingParams())
    assert (request.prompt, request.prompt_token_ids) == ("shown", [1, 2])
    assert request.core.cache_salt == "mine"


@pytest.mark.parametrize(
    ("prompt", "match", "parameter"),
    [
        ("", "The decoder prompt cannot be empty", "prompt"),
        ([], "The decoder prompt cannot be empty", "prompt"),
        ({"prompt_token_ids": []}, "The decoder prompt cannot be empty", "prompt"),
        ([1, 1000], "Token id 1000 is out of vocabulary, at position 1: the model has 1000 tokens", "prompt_token_ids"),
        ([-1], "Token id -1 is out of vocabulary", "prompt_token_ids"),
        ([1, 2.0], "token ids must be integers.*position 1", "prompt_token_ids"),
        ([True], "token ids must be integers", "prompt_token_ids"),
        ([1, "a"], "token ids must be integers", "prompt_token_ids"),
        ([10**30], "Token id .* is out of vocabulary, at position 0", "prompt_token_ids"),
        (
            [1] * 32,
            r"The decoder prompt \(length 32\) plus the number of requested output tokens \(at least 1\) is longer",
            "prompt",
        ),
        (
            [1] * 33,
            "This model's maximum context length is 32 tokens.* 33 input.* reduce the length of the input prompt",
            "prompt",
        ),
        ({"prompt": 3}, "'prompt' must be a str", "prompt"),
        ({"prompt_token_ids": "abc"}, "must be a list of integers", "prompt_token_ids"),
        ({}, "needs 'prompt' or 'prompt_token_ids'", "prompt"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "'multi_modal_data' is not supported", "multi_modal_data"),
        ({"prompt_embeds": 1}, "'prompt_embeds' need an engine with enable_prompt_embeds", "prompt_embeds"),
        ({"prompt_embeds": 1, "text_pair": "a"}, "are the whole prompt: leave 'text_pair' out", "text_pair"),
        ({"prompt_embeds": 1, "prompt": 3}, "'prompt' must be a str", "prompt"),
        ({"prompt_embeds": 1, "cache_salt": ""}, "cache_salt", "cache_salt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "cache_salt"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "'cache_salt' must be Unicode text", "cache_salt"),
        ({"prompt": "a", "cache_salt": 3}, "'cache_salt' must be a string, got 3", "cache_salt"),
        (ParsedPrompt("a", salt="\ud800"), "'cache_salt' must be Unicode text", "cache_salt"),
        (b"bytes", "a prompt is a str", "prompt"),
        (5, "a prompt is a str", "prompt"),
        ("\ud800", "lone surrogates", "prompt"),
    ],
)
def test_refused_prompts(tokenizer: Tokenizer, prompt: Any, match: str, parameter: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as error:
        processor(tokenizer).process("r", prompt, SamplingParams())
    assert error.value.parameter == parameter
    assert str(error.value).startswith("prompt: ")


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token stands for as many characters as the longest one at most."""
    longest = max(map(len, tokenizer.backend.get_vocab()))
    inputs = processor(tokenizer)
    with pytest.raises(VLLMValidationError, match=r"prompt: .* contains \d+ input tokens"):
        inputs.process("r", "a" * (32 * longest), SamplingParams())
    cut = inputs.process("r", "a" * 10_000, SamplingParams(), tokenization_kwargs={"truncation": True, "max_length": 9})
    assert len(cut.prompt_token_ids) == 9
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **_options: pytest.fail("it was tokenized"))
    with pytest.raises(VLLMValidationError, match=rf"prompt: .* contains {32 * longest + 1} characters") as error:
        inputs.process("r", "a" * (32 * longest + 1), SamplingParams())
    assert error.value.parameter == "prompt"


def test_a_batch_names_the_index(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer)
    with pytest.raises(VLLMValidationError, match=r"^prompts\[2\]: The decoder prompt cannot be empty"):
        inputs.process_batch(["0", "1", "2"], ["a", [1], ""], [SamplingParams()] * 3)
    params = [SamplingParams(), SamplingParams(stop_token_ids=[1000])]
    with pytest.raises(VLLMValidationError, match=r"^sampling_params\[1\]: .* in stop_token_ids"):
        inputs.process_batch(["0", "1"], ["a", "b"], params)
    with pytest.raises(VLLMValidationError, match=r"^sampling_params: must be SamplingParams, got None"):
        inputs.process_batch(["0"], ["a"], [None])


def test_a_batch_equals_its_parts(tokenizer: Tokenizer) -> None:
    prompts = ["hello", [1, 2], "the dog", {"prompt": "END"}]
    params = SamplingParams(max_tokens=None)
    batch = processor(tokenizer).process_batch(list("0123"), prompts, [params] * 4)
    single = processor(tokenizer)
    for i, request in enumerate(batch):
        alone = single.process(str(i), prompts[i], params, arrival_time=request.core.arrival_time)
        assert alone == request


def test_special_tokens_and_truncation() -> None:
    inputs = processor(byte_level(bos=True))
    ids = inputs.process("r", "hello world", SamplingParams()).prompt_token_ids
    assert ids[0] == 3
    plain = inputs.process("r", "hello world", SamplingParams(), tokenization_kwargs={"add_special_tokens": False})
    assert plain.prompt_token_ids == ids[1:]
    cut = inputs.process(
        "r", "hello " * 99, SamplingParams(), tokenization_kwargs={"truncation": True, "max_length": 9}
    )
    assert len(cut.prompt_token_ids) == 9
    assert inputs.process("r", "hello world", SamplingParams()).prompt_token_ids == ids  # nothing stays switched on
    for bad in ({"padding": True}, {"truncation": 1}, {"max_length": 0}):
        with pytest.raises(VLLMValidationError):
            inputs.process("r", "hello", SamplingParams(), tokenization_kwargs=bad)


def test_truncate_prompt_tokens() -> None:
    """Texts keep their special tokens, token ids are cut too, -1 leaves room for one token, as in vLLM."""
    inputs = processor(byte_level(bos=True))

    def ids(prompt: Any, **options: Any) -> list[int]:
        return inputs.process("r", prompt, SamplingParams(), tokenization_kwargs=options).prompt_token_ids

    text = "the END of the story" * 5
    whole = processor(byte_level(bos=True), max_model_len=999).process("r", text, SamplingParams()).prompt_token_ids
    assert ids(text, truncate_prompt_tokens=5) == whole[:5]
    assert whole[0] == 3
    assert ids(text, truncate_prompt_tokens=5, truncation_side="left") == whole[-5:]
    assert ids(text, truncate_prompt_tokens=5, truncation_side="right") == whole[:5]
    assert ids(text, truncate_prompt_tokens=5, add_special_tokens=False) == whole[1:6]
    assert ids(text, truncate_prompt_tokens=-1) == ids(text, truncation=True) == whole[:31]
    assert ids(list(range(40)), truncate_prompt_tokens=-1) == list(range(31))
    assert ids([5, 6, 7], truncate_prompt_tokens=2) == ids([5, 6, 7], truncation=True, max_length=2) == [5, 6]
    assert ids([5, 6, 7], truncate_prompt_tokens=2, truncation_side="left") == [6, 7]
    assert ids([5, 6, 7], truncate_prompt_tokens=None) == ids([5, 6, 7], truncation=False) == [5, 6, 7]
    without = processor(None)
    assert without.process(
        "r", [5, 6, 7], SamplingParams(), tokenization_kwargs={"truncate_prompt_tokens": 2}
    ).prompt_token_ids == [5, 6]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be at least 1"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens must be an integer"),
        ({"truncate_prompt_tokens": np.array([1, 2])}, "truncate_prompt_tokens must be an integer"),
        ({"truncate_prompt_tokens": 33}, "truncate_prompt_tokens=33 cannot be greater than max_model_len=32. Please"),
        ({"truncate_prompt_tokens": 3, "truncation": True}, "exclude each other"),
        ({"truncation_side": "top"}, "truncation_side must be one of"),
        ({"max_length": 4}, "max_length goes with truncation=True"),
    ],
)
def test_refused_truncations(tokenizer: Tokenizer, options: dict[str, Any], match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        processor(tokenizer).process("r", "a", SamplingParams(), tokenization_kwargs=options)


def test_max_tokens(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer)
    assert inputs.process("r", [1] * 30, SamplingParams()).core.max_tokens == 2
    assert inputs.process("r", [1] * 31, SamplingParams(max_tokens=None)).core.max_tokens == 1
    assert inputs.process("r", [1] * 10, SamplingParams(max_tokens=None)).core.max_tokens == 22
    assert inputs.process("r", [1] * 10, SamplingParams(max_tokens=5)).core.max_tokens == 5
    with pytest.raises(VLLMValidationError, match="less than or equal to max_tokens=22, got 23") as error:
        inputs.process("r", [1] * 10, SamplingParams(max_tokens=None, min_tokens=23))
    assert error.value.parameter == "min_tokens"


def test_eos_and_stop_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id == 0
    params = SamplingParams(stop_token_ids=[9])
    inputs = processor(tokenizer, {"eos_token_id": [0, 2]})
    sequence = inputs.process("r", "a", params).core
    assert sequence.eos_token_id == 0
    assert sequence.sampling_params.stop_token_ids == [2, 9]
    assert params.stop_token_ids == [9]
    sequence = inputs.process("r", "a", SamplingParams(ignore_eos=True)).core
    assert sequence.eos_token_id is None
    assert sequence.sampling_params.stop_token_ids == []
    sequence = processor(tokenizer, {"eos_token_id": 2}).process("r", "a", SamplingParams()).core
    assert (sequence.eos_token_id, sequence.sampling_params.stop_token_ids) == (0, [2])


def test_users_params_are_never_changed(tokenizer: Tokenizer) -> None:
    for params in (SamplingParams(seed=3), SamplingParams(seed=3, skip_clone=True)):
        before = repr(params), set(params.all_stop_token_ids)
        inputs = processor(tokenizer, {"eos_token_id": [0, 2]})
        batch = inputs.process_batch(["0"], ["a"], [params], output_kind=RequestOutputKind.FINAL_ONLY)
        assert batch[0].params.output_kind is RequestOutputKind.FINAL_ONLY
        assert (repr(params), params.all_stop_token_ids) == before


def test_params_changed_after_they_were_made_are_checked_again(tokenizer: Tokenizer) -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(VLLMValidationError, match="top_p"):
        processor(tokenizer).process("r", "a", params)


def test_n_sequences(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer)
    request = inputs.process("12", "a", SamplingParams(n=3, seed=2**64 - 2))
    sequences = split(request.core)
    assert [sequence.request_id for sequence in sequences] == sequence_ids(request.core) == ["0", "0#1", "0#2"]
    assert [sequence.seed for sequence in sequences] == [2**64 - 2, 2**64 - 1, 0]
    assert [sequence.fork_of for sequence in sequences] == [None, "0", "0"]
    alone = inputs.process("12", "a", SamplingParams())
    assert alone.request_id == "12"
    assert split(alone.core) == [alone.core]
    assert (alone.core.request_id, alone.core.fork_of) == ("1", None)


def test_only_the_first_sequence_scores_the_prompt(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=3, prompt_logprobs=2, prompt_logprob_token_ids=[[1]], prompt_logprob_start=1)
    request = processor(tokenizer).process("12", [1, 2, 3], params)
    sequences = split(request.core)
    assert [each.sampling_params.first_scored_position for each in sequences] == [1, None, None]
    first, second, third = (each.sampling_params for each in sequences)
    assert second is third
    assert first is request.params
    assert (first.prompt_logprob_token_ids, second.prompt_logprob_token_ids) == ([[1]], None)


def test_seeds(tokenizer: Tokenizer) -> None:
    def seeds(*params: SamplingParams) -> list[int]:
        inputs = processor(tokenizer)
        return [inputs.process(str(i), "a", each).core.seed for i, each in enumerate(params)]

    unseeded = seeds(*[SamplingParams()] * 4)
    assert len(set(unseeded)) == 4
    assert unseeded == seeds(*[SamplingParams()] * 4)
    assert unseeded == [mix(7, i) for i in range(4)]
    assert all(0 <= seed < 2**64 for seed in unseeded)
    assert seeds(SamplingParams(seed=5), SamplingParams(seed=-3)) == [5, 2**64 - 3]
    assert mix(0, 1) != mix(1, 0)
    assert mix(0, 0) == 12035550249420947055  # a change would change every unseeded output


def test_priorities(tokenizer: Tokenizer) -> None:
    assert processor(tokenizer, priorities=True).process("r", "a", SamplingParams(), priority=-4).core.priority == -4
    with pytest.raises(VLLMValidationError, match="scheduling_policy='priority'"):
        processor(tokenizer).process("r", "a", SamplingParams(), priority=1)
    with pytest.raises(VLLMValidationError, match=r"priority\[1\] must be an integer"):
        processor(tokenizer).process_batch(["0", "1"], ["a", "b"], [SamplingParams()] * 2, priorities=[0, 1.5])  # type: ignore[list-item]


def test_without_a_tokenizer() -> None:
    inputs = processor(None, {"eos_token_id": [4]})
    sequence = inputs.process("r", [1, 2], SamplingParams()).core
    assert (sequence.eos_token_id, sequence.sampling_params.stop_token_ids) == (None, [4])
    with pytest.raises(VLLMValidationError, match="text needs a tokenizer"):
        inputs.process("r", "text", SamplingParams())
    with pytest.raises(VLLMValidationError, match="stop strings need a tokenizer"):
        inputs.process("r", [1], SamplingParams(stop=["a"]))


def test_one_prompt_or_many() -> None:
    assert all(is_single_prompt(prompt) for prompt in ("a", {"prompt": "a"}, [1, 2], (1,), np.array([1, 2])))
    assert not any(is_single_prompt(prompts) for prompts in ([], ["a"], [[1]], [{"prompt": "a"}], [np.array([1])]))
    with pytest.raises(VLLMValidationError, match="prompts must be"):
        is_single_prompt(3)


@pytest.mark.parametrize("when", ["abc", float("nan"), float("inf"), -1.0, True, [1.0]])
def test_arrival_times_are_checked(tokenizer: Tokenizer, when: Any) -> None:
    with pytest.raises(VLLMValidationError, match="arrival_time must be") as error:
        processor(tokenizer).process("r", "a", SamplingParams(), arrival_time=when)
    assert error.value.parameter == "arrival_time"

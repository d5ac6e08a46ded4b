"""`LLM.beam_search` over a core without a model: its requests, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import random
import signal
from typing import Any

import msgspec
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.beam_search import BeamSearchOutput
from jaxllm.engine.beam_search import BeamSearch, num_candidates
from jaxllm.exceptions import VLLMValidationError
from jaxllm.messages import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from jaxllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from tests.engine.fake_core import FakeCore
from tests.engine.support import byte_level, make_llm
from tests.params.test_beam_search import log_softmax, most_likely

END = 0  # the tokenizer's end of sequence
PROMPTS = [[350, 351], [352], [353, 350, 354]]
WIDTH, MAX_TOKENS = 3, 6


class RandomCore(FakeCore):
    """Log-probabilities are random numbers seeded with the tokens so far; only 14 tokens are likely."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(lambda request: [350] * request.max_tokens, **changes)

    def _advance(self, request: EngineCoreRequest) -> EngineCoreOutput:
        output = super()._advance(request)
        if request.sampling_params.logprobs is None or not request.keeps_blocks:
            return output
        best = most_likely(row_after(request.prompt_token_ids), request.sampling_params.logprobs)
        values = [entry.logprob for entry in best.values()]
        position = TokenLogprobs([next(iter(best)), *best], [values[0], *values], 1)
        return msgspec.structs.replace(output, new_logprobs=[position])


def row_after(token_ids: list[int]) -> list[float]:
    numbers = random.Random(repr(token_ids))
    return log_softmax([5 * numbers.random() + (1.5 if each == END else 0) for each in range(14)] + [-9.0] * 386)


def make(core: FakeCore, **config: Any) -> LLM:
    return make_llm(core, byte_level(), **({"logprobs_mode": "raw_logprobs"} | config))


def params(**changes: Any) -> BeamSearchParams:
    fields: dict[str, Any] = {"beam_width": WIDTH, "max_tokens": MAX_TOKENS}
    return BeamSearchParams(**(fields | changes))


def expected(prompt: list[int], end_ids: frozenset[int] = frozenset({END}), max_tokens: int = MAX_TOKENS) -> list[Any]:
    """Search alone, without an engine."""
    search = BeamSearch(WIDTH, max_tokens, 1.0, end_ids)
    count = num_candidates(WIDTH, end_ids)
    while search.live:
        search.advance([most_likely(row_after(prompt + beam.token_ids), count) for beam in search.live])
    return [(prompt + beam.token_ids, beam.cum_logprob) for beam in search.found]


def found(output: BeamSearchOutput) -> list[Any]:
    return [(sequence.tokens, sequence.cum_logprob) for sequence in output.sequences]


@pytest.mark.parametrize("limit", [None, 1, 2, 100])
def test_every_prompt_gets_its_own_search(limit: int | None) -> None:
    core = RandomCore()
    most: list[int] = []
    core.before_step = lambda _: most.append(len({each.split(".")[0] for each in core.requests}))
    outputs = make(core).beam_search(PROMPTS, params(), concurrency_limit=limit)
    assert [found(output) for output in outputs] == [expected(prompt) for prompt in PROMPTS]
    assert max(most) == min(limit or 3, 3)
    assert not core.requests
    assert not core.parked


def test_beams_are_forks_of_their_parents() -> None:
    core = RandomCore()
    make(core).beam_search(PROMPTS, params(ignore_eos=True))
    seen = {request.request_id: request for request in core.seen}
    assert len(seen) == 3 * (1 + WIDTH * (MAX_TOKENS - 1))
    for request in seen.values():
        assert request.keeps_blocks
        assert request.max_tokens == 1
        if request.fork_of is None:
            assert request.prompt_token_ids in PROMPTS
        else:
            assert request.prompt_token_ids[:-1] == seen[request.fork_of].prompt_token_ids


def test_what_a_sequence_holds() -> None:
    core = RandomCore()
    llm = make(core)
    prompt: Any = {"prompt_token_ids": [350, 351], "prompt": "as it was", "cache_salt": "mine"}
    [output] = llm.beam_search(prompt, params())
    assert {each.cache_salt for each in core.seen} == {"mine"}
    tokenizer = llm.get_tokenizer()
    assert {sequence.finish_reason for sequence in output.sequences} == {"stop", "length"}
    for sequence in output.sequences:
        assert sequence.orig_prompt == {"type": "token", **prompt}
        generated = sequence.tokens[2:]
        ends = generated[-1] == END
        assert (sequence.finish_reason, sequence.stop_reason) == (("stop", END) if ends else ("length", None))
        assert sequence.text == tokenizer.decode(sequence.tokens[:-1] if ends else sequence.tokens)
        assert sum(top[each].logprob for top, each in zip(sequence.logprobs, generated, strict=True)) == pytest.approx(
            sequence.cum_logprob
        )
        assert all(len(top) == 2 * WIDTH for top in sequence.logprobs)
        assert sequence.logprobs[0][generated[0]].decoded_token == tokenizer.decode([generated[0]])
    [whole] = llm.beam_search(prompt, params(include_stop_str_in_output=True))
    assert [each.text for each in whole.sequences] == [tokenizer.decode(each.tokens) for each in whole.sequences]


def test_without_a_tokenizer_there_is_no_text_and_only_the_generation_config_ends() -> None:
    core = RandomCore()
    config: dict[str, Any] = {"logprobs_mode": "raw_logprobs", "skip_tokenizer_init": True}
    [output] = make_llm(core, None, **config).beam_search([350], params())
    assert found(output) == expected([350], frozenset())
    assert all(sequence.text is None for sequence in output.sequences)
    two_ends: dict[str, Any] = {"generation_config": {"eos_token_id": [END, 5]}}
    [output] = make_llm(core, None, **config, **two_ends).beam_search([350], params())
    assert found(output) == expected([350], frozenset({END, 5}))
    assert core.seen[-1].sampling_params.logprobs == 3 * WIDTH


def test_the_context_ends_a_search() -> None:
    core = RandomCore(max_model_len=5)
    [output] = make(core).beam_search([PROMPTS[0]], params(max_tokens=50, ignore_eos=True))
    assert found(output) == expected(PROMPTS[0], frozenset(), max_tokens=3)
    assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


def test_no_prompts_no_searches() -> None:
    assert make(RandomCore()).beam_search([], params()) == []


def test_what_is_enqueued_runs_on() -> None:
    core = RandomCore()
    llm = make(core)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    alone = llm.generate([[350]], greedy, use_tqdm=False)[0].outputs[0].token_ids
    llm.enqueue([[350], [350]], greedy)
    assert found(llm.beam_search(PROMPTS[:1], params())[0]) == expected(PROMPTS[0])
    assert [each.outputs[0].token_ids for each in llm.wait_for_completion(use_tqdm=False)] == [alone, alone]


@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("how", ["ctrl-c", "error", "abort"])
def test_interrupts_and_errors_leave_nothing_behind(how: str, step: int) -> None:
    core = RandomCore(running=2)
    llm = make(core)

    def strike(at: int) -> None:
        if at != step:
            return
        if how == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        elif how == "error":
            raise ValueError("the device is gone")
        else:
            llm.llm_engine.abort_request(list(core.requests))

    core.before_step = strike
    error = {"ctrl-c": KeyboardInterrupt, "error": ValueError, "abort": RuntimeError}[how]
    with pytest.raises(error):
        llm.beam_search(PROMPTS, params())
    assert not core.requests
    assert not core.parked
    assert not llm.llm_engine.has_unfinished_requests()
    core.before_step = lambda _: None
    assert found(llm.beam_search(PROMPTS[:1], params())[0]) == expected(PROMPTS[0])


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"temperature": 0.5}, {}, "temperature=0 only"),
    ({"structured_outputs": StructuredOutputsParams(choice=["a", "b"])}, {}, "structured_outputs"),
    ({"beam_width": 11}, {}, "beam_width=11 .* 22 .* max_logprobs=20"),
    ({}, {"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits'"),
    ({}, {"logits_processors": (lambda logits_sv, state: logits_sv,)}, "logits_processors .*processed_logprobs"),
]


@pytest.mark.parametrize(("changes", "config", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_be_searched_is_refused(changes: dict[str, Any], config: dict[str, Any], message: str) -> None:
    core = RandomCore()
    with pytest.raises(VLLMValidationError, match=message):
        make(core, **config).beam_search([[350]], params(**changes))
    assert not core.seen


def test_wrong_arguments_are_refused() -> None:
    core = RandomCore()
    llm = make(core)
    wrong: Any = SamplingParams()
    with pytest.raises(VLLMValidationError, match="BeamSearchParams"):
        llm.beam_search([[350]], wrong)
    with pytest.raises(VLLMValidationError, match="concurrency_limit"):
        llm.beam_search([[350]], params(), concurrency_limit=0)
    with pytest.raises(VLLMValidationError, match="lora_request"):
        llm.beam_search([[350]], params(), lora_request=object())
    with pytest.raises(VLLMValidationError, match=r"prompts\[1\]: token id 1000"):
        llm.beam_search([[350], [1000]], params())
    assert not core.seen


def test_the_bar_counts_prompts() -> None:
    updates: list[int] = []

    class Bar:
        def __init__(self, total: int, **_: Any) -> None:
            assert total == len(PROMPTS)

        def update(self, count: int) -> None:
            updates.append(count)

        def refresh(self) -> None: ...

        def close(self) -> None: ...

    make(RandomCore()).beam_search(PROMPTS, params(), use_tqdm=Bar)
    assert updates == [1, 1, 1]

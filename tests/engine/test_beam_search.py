"""`LLM.beam_search` over a core without a model: its requests, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from typing import Any

import msgspec
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.beam_search import BeamSearchOutput
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.core_messages import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from jaxllm.engine.beam.search import BeamSearcher
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from tests.engine.fake_core import FakeCore
from tests.engine.support import byte_level, make_llm
from tests.engine.test_beams import by_the_book, log_softmax, most_likely

END = 0  # the tokenizer's end of sequence
PROMPTS = [[350, 351], [352], [353, 350, 354]]
WIDTH, MAX_TOKENS = 3, 6
REGEX = StructuredOutputsParams(regex="a")


class RandomCore(FakeCore):
    """Log-probabilities are random numbers seeded with the tokens so far; only 14 tokens are likely."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(lambda request: [350] * request.max_tokens, **changes)
        self.drawn = 399
        """What is drawn at a temperature; it is sure to come, though not among the most likely."""

    def _advance(self, request: EngineCoreRequest) -> EngineCoreOutput:
        output = super()._advance(request)
        asked = request.sampling_params
        if (asked.logprobs is None and asked.logprob_token_ids is None) or not request.keeps_blocks:
            return output
        row = row_after(request.prompt_token_ids)
        ids = asked.logprob_token_ids or list(most_likely(row, asked.logprobs or 0))
        allowed = range(len(row)) if asked.allowed_token_ids is None else asked.allowed_token_ids
        drawn = self.drawn if asked.temperature else max(allowed, key=row.__getitem__)
        ids = [drawn, *ids]
        position = TokenLogprobs(ids, [0.0 if each == self.drawn else row[each] for each in ids], 1)
        return msgspec.structs.replace(output, new_logprobs=[position])


class AbortingCore(RandomCore):
    """Ends one request of the second search at its fourth step."""

    def _advance(self, request: EngineCoreRequest) -> EngineCoreOutput:
        output = super()._advance(request)
        if not request.request_id.startswith("1.3.1."):
            return output
        self.parked.discard(request.request_id)
        return EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason="abort")


def row_after(token_ids: list[int]) -> list[float]:
    numbers = random.Random(repr(token_ids))
    return log_softmax([5 * numbers.random() + (1.5 if each == END else 0) for each in range(14)] + [-9.0] * 386)


def make(core: FakeCore, **settings: Any) -> LLM:
    return make_llm(core, byte_level(), **settings)


def params(**changes: Any) -> BeamSearchParams:
    fields: dict[str, Any] = {"beam_width": WIDTH, "max_tokens": MAX_TOKENS}
    return BeamSearchParams(**(fields | changes))


def expected(prompt: list[int], *, max_tokens: int = MAX_TOKENS, **settings: Any) -> list[list[int]]:
    """Search alone, without an engine."""

    def rows_after(ids: list[int]) -> dict[int, float]:
        return {each: entry.logprob for each, entry in most_likely(row_after(prompt + ids), 2 * WIDTH).items()}

    settings = {"num_prompt": len(prompt), "width": WIDTH, "penalty": 1.0, "end": END} | settings
    return [prompt + ids for ids in by_the_book(rows_after, max_tokens=max_tokens, **settings)]


def found(output: BeamSearchOutput) -> list[list[int]]:
    return [sequence.tokens for sequence in output.sequences]


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
    [output] = llm.beam_search(prompt, params(max_tokens=3))
    assert {each.cache_salt for each in core.seen} == {"mine"}
    tokenizer = llm.get_tokenizer()
    assert {sequence.finish_reason for sequence in output.sequences} == {"stop", "length"}
    for sequence in output.sequences:
        assert sequence.orig_prompt == {"type": "token", **prompt}
        generated = sequence.tokens[2:]
        ends = generated[-1] == END
        assert (sequence.finish_reason, sequence.stop_reason) == (("stop", END) if ends else ("length", None))
        assert sequence.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert sum(top[each].logprob for top, each in zip(sequence.logprobs, generated, strict=True)) == pytest.approx(
            sequence.cum_logprob
        )
        assert all(len(top) == 2 * WIDTH for top in sequence.logprobs)
        assert sequence.logprobs[0][generated[0]].decoded_token == tokenizer.decode([generated[0]])
    shown = [tokenizer.decode(each.tokens, skip_special_tokens=False) for each in output.sequences]
    [whole] = llm.beam_search(prompt, params(max_tokens=3, skip_special_tokens=False))
    assert [each.text for each in whole.sequences] == shown
    [kept] = llm.beam_search(prompt, params(max_tokens=3, include_stop_str_in_output=True))
    for sequence in kept.sequences:
        end = "<|end|>" if sequence.finish_reason == "stop" else ""
        assert sequence.text == f"{tokenizer.decode(sequence.tokens, skip_special_tokens=True)}{end}"


def test_without_a_tokenizer_there_is_no_text_and_only_the_generation_config_ends() -> None:
    core = RandomCore()
    [output] = make_llm(core, None, skip_tokenizer_init=True).beam_search([350], params())
    assert found(output) == expected([350], end=None)
    assert all(sequence.text is None for sequence in output.sequences)
    for ends in ([END, 5], END):
        [output] = make_llm(core, None, generation_config={"eos_token_id": ends}).beam_search([350], params())
        assert found(output) == expected([350])


def test_the_context_ends_a_search() -> None:
    core = RandomCore(max_model_len=5)
    [output] = make(core).beam_search([PROMPTS[0]], params(max_tokens=50, ignore_eos=True))
    assert found(output) == expected(PROMPTS[0], max_tokens=3, ignore_eos=True)
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
@pytest.mark.parametrize("how", ["ctrl-c", "error"])
def test_interrupts_and_errors_leave_nothing_behind(how: str, step: int) -> None:
    core = RandomCore(running=2)
    llm = make(core)

    def strike(at: int) -> None:
        if at != step:
            return
        if how == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        else:
            raise ValueError("the device is gone")

    core.before_step = strike
    with pytest.raises({"ctrl-c": KeyboardInterrupt, "error": ValueError}[how]):
        llm.beam_search(PROMPTS, params())
    assert not core.requests
    assert not core.parked
    assert not llm.llm_engine.has_unfinished_requests()
    core.before_step = lambda _: None
    assert found(llm.beam_search(PROMPTS[:1], params())[0]) == expected(PROMPTS[0])


@pytest.mark.parametrize("how", ["by the core", "by the user"])
def test_aborted_searches_return_what_they_have(how: str) -> None:
    core = AbortingCore() if how == "by the core" else RandomCore()
    llm = make(core)

    def strike(at: int) -> None:
        if how == "by the user" and at == 3:
            llm.llm_engine.abort_request([each for each in core.requests if each.startswith("1.")][:1])

    core.before_step = strike
    first, second, third = llm.beam_search(PROMPTS, params(ignore_eos=True))
    whole = [expected(prompt, ignore_eos=True) for prompt in PROMPTS]
    assert [found(first), found(third)] == [whole[0], whole[2]]
    assert {sequence.finish_reason for sequence in first.sequences} == {"length"}
    assert [sequence.finish_reason for sequence in second.sequences] == ["abort"] * WIDTH
    assert found(second) == expected(PROMPTS[1], max_tokens=3, ignore_eos=True)
    assert not core.requests
    assert not core.parked
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_token_drawn_at_a_temperature_is_a_candidate_too() -> None:
    core = RandomCore()
    [output] = make(core).beam_search([[350]], params(temperature=0.7))
    assert found(output)[0] == [350] + [core.drawn] * MAX_TOKENS
    assert {each.sampling_params.temperature for each in core.seen} == {0.7}
    assert len({(each.seed, each.request_id.split(".")[1]) for each in core.seen}) == len(core.seen)
    make(core).beam_search([[350]], params())
    assert core.seen[-1].sampling_params.temperature == 0.0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_structured_outputs_choose_among_the_candidates(ignore_eos: bool) -> None:
    """The grammar says what may follow, and the scores are those without it, as in vLLM."""
    tokenizer = byte_level()
    assert [tokenizer.token_string(each) for each in range(4, 10)] == list('!"#$%&')
    pattern = "[!-&]{2,4}"

    def rows_after(ids: list[int]) -> dict[int, float]:
        if END in ids:
            return {}
        row, allowed = row_after([350, *ids]), [END] * (len(ids) >= 2) + [*range(4, 10)] * (len(ids) < 4)
        best = [max(allowed, key=row.__getitem__), *most_likely(row, 2 * WIDTH)]
        return {each: row[each] for each in best if each in allowed}

    core = RandomCore(grammars=GrammarCompiler(tokenizer, 1000, [END, 1]))
    llm = make(core, generation_config={"eos_token_id": [END, 1]})
    [output] = llm.beam_search(
        [[350]], params(structured_outputs=StructuredOutputsParams(regex=pattern), ignore_eos=ignore_eos)
    )
    settings: dict[str, Any] = {"num_prompt": 1, "width": WIDTH, "max_tokens": MAX_TOKENS, "penalty": 1.0, "end": END}
    assert [ids[1:] for ids in found(output)] == by_the_book(rows_after, ignore_eos=ignore_eos, **settings)
    assert {sequence.finish_reason for sequence in output.sequences} == {"stop"}
    assert len(output.sequences) == WIDTH
    for sequence in output.sequences:
        assert re.fullmatch(pattern, (sequence.text or "").removeprefix(tokenizer.token_string(350)))
        rows = [row_after(sequence.tokens[:i]) for i in range(1, len(sequence.tokens))]
        values = [row[each] for row, each in zip(rows, sequence.tokens[1:], strict=True)]
        assert sequence.cum_logprob == pytest.approx(sum(values))
    assert all(each.sampling_params.structured_outputs is None for each in core.seen)
    assert not core.parked


@pytest.mark.parametrize("allowed", [[END, 3, 5, 7, 20], [9], [20, END]])
def test_only_allowed_tokens_are_added_with_the_models_own_scores(allowed: list[int]) -> None:
    core = RandomCore()
    core.drawn = 1  # what is sampled need not be allowed

    def search(prompt: list[int]) -> list[list[int]]:
        def rows_after(ids: list[int]) -> dict[int, float]:
            row = row_after(prompt + ids)
            return {each: row[each] for each in sorted(allowed, key=row.__getitem__, reverse=True)}

        settings = {"num_prompt": len(prompt), "width": WIDTH, "penalty": 1.0, "end": END}
        return [prompt + ids for ids in by_the_book(rows_after, max_tokens=MAX_TOKENS, **settings)]

    llm = make(core)
    outputs = llm.beam_search(PROMPTS, params(allowed_token_ids=allowed, temperature=0.5))
    assert [found(each) for each in outputs] == [search(prompt) for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for sequence in output.sequences:
            ids = sequence.tokens[len(prompt) :]
            rows = [row_after(sequence.tokens[: len(prompt) + i])[each] for i, each in enumerate(ids)]
            assert sequence.cum_logprob == pytest.approx(sum(rows))
    for fields in ({"allowed_token_ids": []}, {"allowed_token_ids": [1], "structured_outputs": REGEX}):
        with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
            params(**fields)
    with pytest.raises(VLLMValidationError, match="1000"):
        llm.beam_search([[350]], params(allowed_token_ids=[1000]))
    most = llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    with pytest.raises(VLLMValidationError, match=f"the {most} sequences that run at once"):
        llm.beam_search([[350]], params(allowed_token_ids=[1], beam_width=most + 1))


def begin(llm: LLM, prompts: list[list[int]], wanted: BeamSearchParams) -> BeamSearcher:
    """Begin searches; the caller runs their requests."""
    engine = llm.llm_engine
    searcher = BeamSearcher(engine, engine.front, wanted, None)
    ids = [str(i) for i in range(len(prompts))]
    searcher.start(engine.process_requests(ids, prompts, [searcher.sampling_params] * len(prompts)))
    return searcher


def test_an_event_loop_can_drive_searches() -> None:
    """Searches with and without a grammar share their engine with each other and with a request of the same name."""
    ends = {"eos_token_id": [END, 1]}
    core = RandomCore()
    with_grammar = params(structured_outputs=StructuredOutputsParams(regex="[!-&]{2,4}"))
    [alone] = make(RandomCore(), generation_config=ends).beam_search([[350]], with_grammar)
    llm = make(core, generation_config=ends)

    async def drive() -> tuple[BeamSearcher, BeamSearcher]:
        both = begin(llm, PROMPTS, params()), begin(llm, [[350]], with_grammar)
        assert not both[0].masks
        assert len(both[1].masks) == 1
        llm.llm_engine.add_request("0", [350], SamplingParams(max_tokens=3))
        while not all(searcher.is_done for searcher in both):
            for output in llm.llm_engine.step():
                for searcher in both:
                    searcher.take(output)
            for searcher in both:
                waiting = [asyncio.wrap_future(each) for each in searcher.masks]
                if waiting:
                    await asyncio.wait(waiting)
                    searcher.resume(wait=False)
                    assert not searcher.masks
        return both

    plain, constrained = asyncio.run(drive())
    assert [found(output) for output in plain.outputs()] == [expected(prompt) for prompt in PROMPTS]
    assert [found(output) for output in constrained.outputs()] == [found(alone)]
    assert not core.parked
    assert not core.requests


def test_a_search_that_waits_for_its_grammar_can_be_aborted() -> None:
    core = RandomCore()
    llm = make(core)
    searcher = begin(llm, [[350], [351]], params(structured_outputs=StructuredOutputsParams(regex="[!-&]{2,4}")))
    searcher.resume(wait=True)
    for output in llm.llm_engine.step():
        searcher.take(output)
    assert len(searcher.masks) == 2
    assert core.parked
    searcher.abort()
    assert searcher.is_done
    assert not searcher.masks
    assert not core.parked
    assert not core.requests
    assert not llm.llm_engine.has_unfinished_requests()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"structured_outputs": StructuredOutputsParams(grammar="root ::= nothing")}, {}, "grammar"),
    ({"beam_width": 11}, {}, "beam_width=11 .* 22 .* max_logprobs=20"),
    ({}, {"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits'"),
    ({}, {"has_logits_processors": True}, "logits_processors .*processed_logprobs"),
]


@pytest.mark.parametrize(("changes", "config", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_be_searched_is_refused(changes: dict[str, Any], config: dict[str, Any], message: str) -> None:
    core = RandomCore(grammars=GrammarCompiler(byte_level(), 1000, [END]))
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
        llm.beam_search([[350]], params(), lora_request=[None, None])
    with pytest.raises(VLLMValidationError, match=r"prompts\[1\]: Token id 1000 is out of vocabulary"):
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

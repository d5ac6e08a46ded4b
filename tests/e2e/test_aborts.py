"""Requests end early on a real engine: aborted in every state, by Ctrl-C, by a stop string. Blocks come back, the
others' outputs are what they would have been, and the engine goes on.
"""

from __future__ import annotations

import dataclasses
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from jaxllm import LLM, CompletionOutput, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.sampling_params import RequestOutputKind
from tests.e2e.tiny_engine import (
    CASE,
    NUM_LOGPROBS,
    Job,
    RecordingScheduler,
    difference,
    differences,
    run_together,
    tiny_llm,
)
from tests.engine.support import byte_level
from tests.scheduling.simulation import state_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

STATES = ("waiting", "mid-prefill", "decoding", "preempted")
NUM_ABORTS = 20
VICTIMS_PER_ROUND = 10
MOST_ROUNDS = 20
Engine = tuple[LLM, RecordingScheduler]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a byte-level tokenizer: the 256 ids are special tokens and bytes, so that text has broken characters."""
    path = str(tmp_path_factory.mktemp("tokenizer"))
    byte_level().hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["a step in flight", "no step in flight"])
def engine(request: pytest.FixtureRequest, tokenizer_folder: str) -> Iterator[Engine]:
    """Start an engine of 33 blocks and 16 tokens a step, which leaves a step in flight after each `step`, or none."""
    arguments = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "num_gpu_blocks_override": 33}
    with tiny_llm(
        CASE,
        async_scheduling=request.param,
        skip_tokenizer_init=False,
        tokenizer=tokenizer_folder,
        **arguments,
    ) as made:
        yield made


def make_job(seed: int, length: int, max_tokens: int, n: int = 1) -> Job:
    """Return a job with a random prompt, sampled."""
    rng = random.Random(seed)
    prompt = [rng.randrange(4, 256) for _ in range(length)]
    params = SamplingParams(
        temperature=1.5, seed=seed, max_tokens=max_tokens, n=n, logprobs=NUM_LOGPROBS, ignore_eos=True, detokenize=False
    )
    return Job(prompt, params)


def overlaps(llm: LLM) -> bool:
    """Return whether the engine leaves a step in flight."""
    return llm.llm_engine.vllm_config.scheduler_config.async_scheduling


def assert_idle(engine: Engine) -> None:
    """Check that no request is queued, running or in flight, and that every block is free."""
    llm, scheduler = engine
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_blocks_in_use) == (0, 0, 0)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.cache.tables == {}
    assert scheduler.cache.groups[0].pool.num_available == 32


def add(llm_engine: LLMEngine, request_id: str, job: Job) -> None:
    """Queue a job."""
    llm_engine.add_request(request_id, TokensPrompt(prompt_token_ids=job.prompt), job.params)


def stage_of(scheduler: RecordingScheduler, sequence_id: str, num_prompt_tokens: int) -> str | None:
    """Return the state of a sequence, or None once it has ended."""
    try:
        state = state_of(scheduler, sequence_id)
    except KeyError:
        return None
    if state != "running":
        return state
    num_computed = scheduler.cache.tables[sequence_id].num_computed_tokens
    return "mid-prefill" if num_computed < num_prompt_tokens else "decoding"


@dataclass
class Aborter:
    """Runs rounds of survivors and victims, and aborts each victim some steps after it came into a state."""

    engine: Engine
    state: str
    n: int
    num_aborted: int = 0
    num_in_flight: int = 0
    """How many were aborted while the device was computing something for them."""
    _rng: random.Random = field(default_factory=lambda: random.Random(7))
    _victims: dict[str, Job] = field(default_factory=dict)

    def run_round(self, name: str, survivors: list[Job]) -> list[RequestOutput]:
        """Return the survivors' outputs; victims come before, between and after them."""
        llm_engine = self.engine[0].llm_engine
        victims = [f"{name} victim {index}" for index in range(VICTIMS_PER_ROUND)]
        ids = [f"{name} survivor {index}" for index in range(len(survivors))]
        outputs: dict[str, RequestOutput] = {}
        for request_id, job in zip(ids, survivors, strict=True):
            self._add_victim(victims.pop())
            add(llm_engine, request_id, job)
        while llm_engine.has_unfinished_requests():
            for output in llm_engine.step():
                assert output.request_id in ids or output.request_id in self._victims, "heard of after its abort"
                if output.finished:
                    self._victims.pop(output.request_id, None)
                    outputs[output.request_id] = output
            if victims and self._rng.random() < 0.5:
                self._add_victim(victims.pop())
            self._abort_some()
        return [outputs[request_id] for request_id in ids]

    def _add_victim(self, request_id: str) -> None:
        # Together they outgrow the blocks: some are preempted.
        job = make_job(self._rng.randrange(2**32), self._rng.randrange(18, 45), max_tokens=70, n=self.n)
        add(self.engine[0].llm_engine, request_id, job)
        self._victims[request_id] = job

    def _abort_some(self) -> None:
        llm, scheduler = self.engine
        for request_id, job in list(self._victims.items()):
            sequences = scheduler.sequence_ids[request_id]
            states = [stage_of(scheduler, each, len(job.prompt)) for each in sequences]
            if self.state not in states or self._rng.random() < 0.5:
                continue
            self.num_aborted += 1
            self.num_in_flight += any(scheduler.is_in_flight(each) for each in sequences)
            llm.llm_engine.abort_request(request_id)
            del self._victims[request_id]
            assert not scheduler.cache.tables.keys() & set(sequences), "its blocks are still held"
            assert [stage_of(scheduler, each, 0) for each in sequences] == [None] * self.n
            scheduler.check()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("state", STATES)
def test_aborted_in_each_state(engine: Engine, state: str, n: int) -> None:
    llm, _ = engine
    survivors = [make_job(1, 130, max_tokens=40), make_job(2, 10, max_tokens=60)]
    undisturbed = run_together(llm, survivors)
    aborter = Aborter(engine, state, n)
    num_rounds = 0
    while aborter.num_aborted < NUM_ABORTS:
        num_rounds += 1
        assert num_rounds <= MOST_ROUNDS, f"only {aborter.num_aborted} victims were ever {state}"
        assert differences(undisturbed, aborter.run_round(f"round {num_rounds}", survivors)) == {}
        assert_idle(engine)
    if not overlaps(llm):
        assert aborter.num_in_flight == 0
    elif state in ("mid-prefill", "decoding"):
        assert aborter.num_in_flight >= NUM_ABORTS // 2
    assert llm.reset_prefix_cache()
    assert differences(undisturbed, run_together(llm, survivors)) == {}


def test_nothing_is_left_when_all_are_aborted(engine: Engine) -> None:
    """All requests are aborted after any number of steps; the step in flight then belongs to none of them."""
    llm, scheduler = engine
    jobs = [make_job(seed, 7 * seed, max_tokens=30) for seed in range(1, 8)]
    undisturbed = run_together(llm, jobs)
    for num_steps in range(NUM_ABORTS):
        ids = [f"{num_steps} {index}" for index in range(len(jobs))]
        for request_id, job in zip(ids, jobs, strict=True):
            add(llm.llm_engine, request_id, job)
        for _ in range(num_steps):
            llm.llm_engine.step()
        assert (len(scheduler.in_flight) > 0) == (overlaps(llm) and num_steps > 0)
        llm.llm_engine.abort_request(ids)
        assert_idle(engine)
        assert llm.llm_engine.step() == []
        assert differences(undisturbed[num_steps % 7 :], run_together(llm, jobs[num_steps % 7 :])) == {}
    assert_idle(engine)


@pytest.mark.parametrize("num_presses", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 5, 20, 45])
def test_ctrl_c_leaves_the_engine_usable(engine: Engine, num_steps: int, num_presses: int) -> None:
    """The first Ctrl-C waits for the step's end, and requests of other calls go on; the second cuts the step off."""
    llm, scheduler = engine
    jobs = [make_job(seed, 15 * seed, max_tokens=30) for seed in range(1, 8)]
    undisturbed = run_together(llm, jobs)
    llm.enqueue(TokensPrompt(prompt_token_ids=jobs[0].prompt), jobs[0].params)
    countdown = [num_steps]

    def press() -> None:
        countdown[0] -= 1
        if countdown[0] == -1:
            for _ in range(num_presses):
                signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "before_plan", press)
        with pytest.raises(KeyboardInterrupt):
            run_together(llm, jobs[1:])
    # The call in which the key is pressed may launch another step ahead.
    assert countdown[0] >= -2, "it went on after the step in which the key was pressed"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    scheduler.check()
    try:
        kept = llm.wait_for_completion(use_tqdm=False)
    except RuntimeError:
        assert num_presses == 2, "the only request that is waited for failed"
    else:
        assert differences(undisturbed[:1], kept) == {}
    assert_idle(engine)
    assert differences(undisturbed, run_together(llm, jobs)) == {}
    assert_idle(engine)


TEXT_PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "top_k": 30},
    {"n": 3, "skip_special_tokens": False, "stop_token_ids": list(range(20, 60))},
    {"temperature": 0.0, "seed": None},
    {"stop": ["a", "0"]},
    {"stop": ["e", "12", "\ufffd\ufffd"], "include_stop_str_in_output": True, "n": 2},
)


def text_jobs(kind: RequestOutputKind) -> list[Job]:
    """Return jobs whose outputs are shown as text; their settings differ."""
    jobs = []
    for seed, changes in enumerate(TEXT_PARAMS):
        settings = {"temperature": 1.5, "seed": seed, "max_tokens": 40, "logprobs": NUM_LOGPROBS, "ignore_eos": True}
        params = SamplingParams(**(settings | changes), output_kind=kind)
        jobs.append(Job(make_job(seed, 4 + 20 * seed, 1).prompt, params))
    return jobs


def stream(llm_engine: LLMEngine, jobs: list[Job]) -> list[dict[int, list[CompletionOutput]]]:
    """Run jobs side by side and return the pieces of every output of each job."""
    pieces: list[dict[int, list[CompletionOutput]]] = [defaultdict(list) for _ in jobs]
    unfinished = {str(index) for index in range(len(jobs))}
    for index, job in enumerate(jobs):
        add(llm_engine, str(index), job)
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            assert output.request_id in unfinished
            for piece in output.outputs:
                pieces[int(output.request_id)][piece.index].append(piece)
            if output.finished:
                unfinished.remove(output.request_id)
    assert not unfinished
    return pieces


def join(pieces: list[CompletionOutput]) -> CompletionOutput:
    """Put DELTA pieces together."""
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=[step for piece in pieces for step in piece.logprobs or ()],
    )


def test_streamed_pieces_make_the_final_output(engine: Engine) -> None:
    llm, _ = engine
    final = run_together(llm, text_jobs(RequestOutputKind.FINAL_ONLY))
    deltas = stream(llm.llm_engine, text_jobs(RequestOutputKind.DELTA))
    cumulative = stream(llm.llm_engine, text_jobs(RequestOutputKind.CUMULATIVE))
    for output, delta, whole, changes in zip(final, deltas, cumulative, TEXT_PARAMS, strict=True):
        assert len(output.outputs) == len(delta) == len(whole) == changes.get("n", 1)
        for expected in output.outputs:
            joined, last = join(delta[expected.index]), whole[expected.index][-1]
            assert joined.text == last.text == expected.text
            assert difference(expected, joined) is None
            assert difference(expected, last) is None
            assert len(delta[expected.index]) > len(expected.token_ids) // 2, "it did not come piece by piece"
            texts = [piece.text for piece in whole[expected.index]]
            assert all(after.startswith(before) for before, after in pairwise(texts)), "text was taken back"
    reasons = [completion.stop_reason for output in final for completion in output.outputs]
    assert any(isinstance(reason, int) for reason in reasons)
    assert sum(isinstance(reason, str) for reason in reasons) >= 2
    assert_idle(engine)

"""A draft model reads each token of a request once, and never anything but the request's tokens.

As in `simulation.py` the keys and values of a position are one number, a digest of the tokens up to it. The draft
model's pool holds them by the block tables that it is given, and every chunk reads back its whole context. A draft head
has a shift of 1: what it has of a position is a digest of the tokens after the first, up to the one after the position.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxllm.config.speculative import SpeculativeConfig
from jaxllm.scheduling.config import GroupConfig, SchedulerConfig
from jaxllm.scheduling.draft_steps import DraftPlan
from jaxllm.scheduling.plan import Chunk, StepPlan
from jaxllm.speculation.drafter import DraftModelLimits
from tests.scheduling.simulation import VOCAB_SIZE, Simulation, extend_digest, first_digest, make_config, make_request
from tests.scheduling.test_simulation import CHANGES, TINY, workload
from tests.scheduling.test_speculation import counted

pytestmark = pytest.mark.scheduling

MOST = 4
STEP_TOKENS = 24
"""The tokens of a draft model's step: prompts take several."""


class DraftDevice:
    """Run a draft model's steps, whose guesses are right or wrong as a coin says."""

    def __init__(self, simulation: Simulation, limits: DraftModelLimits, seed: int, wrong: float) -> None:
        self._simulation, self._limits, self._random, self._wrong = simulation, limits, random.Random(seed), wrong
        config = simulation.config
        self._digests = [-1] * (config.groups[limits.group].num_blocks * config.block_size)
        self._previous: list[int] = []
        self.num_tokens = 0
        """The tokens that were read so far."""

    def run(self, plan: DraftPlan) -> list[list[int]]:
        return [self._run(step) for step in plan.steps]

    def _run(self, step: StepPlan) -> list[int]:
        lengths = [len(chunk.token_ids) for chunk in step.chunks]
        alignment = self._limits.row_alignment
        rows = [-(-length // alignment) for length in (lengths.count(1), *(each for each in lengths if each > 1))]
        assert 0 < sum(lengths) <= self._limits.max_num_batched_tokens
        assert sum(rows) <= -(-self._limits.max_num_batched_tokens // alignment)
        assert lengths == sorted(lengths, key=lambda length: length > 1), "one-token chunks come first"
        assert len({chunk.request_id for chunk in step.chunks}) == len(lengths)
        self._previous = [self._read(chunk) for chunk in step.chunks]
        return self._previous

    def _read(self, chunk: Chunk) -> int:
        request = self._simulation.scheduler._requests[chunk.request_id]
        token_ids = list(chunk.token_ids) if chunk.previous_row is None else [self._previous[chunk.previous_row]]
        assert chunk.block_ids == (chunk.block_ids[0],) * self._limits.num_groups
        slots = self._slots(chunk.block_ids[0], chunk.start + len(token_ids))
        # What it can read of the tokens that are certain; a head reads what the model has computed.
        certain = request.token_ids.tolist()[self._limits.shift :]
        computed = self._simulation.scheduler.cache.tables[chunk.request_id].num_computed_tokens
        assert not self._limits.shift or chunk.start + len(token_ids) <= computed or chunk.previous_row is not None
        digest = first_digest(None)
        for position in range(chunk.start):
            if position >= len(certain):
                digest = self._digests[slots[position]]
                continue
            digest = extend_digest(digest, certain[position])
            # Another request's next token may have been another one.
            is_shared = self._limits.shift and (position + 1) % self._simulation.config.block_size == 0
            assert is_shared or self._digests[slots[position]] == digest, "it reads what is not the request's"
        for position, token_id in enumerate(token_ids, chunk.start):
            assert position >= len(certain) or token_id == certain[position]
            digest = extend_digest(digest, token_id)
            self._digests[slots[position]] = digest
        self.num_tokens += len(token_ids)
        end = chunk.start + len(token_ids)
        assert chunk.samples == (end >= len(certain))
        return self._guess(chunk.request_id, end + self._limits.shift)

    def _slots(self, block_ids: array[int], num_tokens: int) -> list[int]:
        size = self._simulation.config.block_size
        assert len(block_ids) == -(-num_tokens // size)
        assert 0 not in block_ids
        return [block_id * size + place for block_id in block_ids for place in range(size)]

    def _guess(self, request_id: str, position: int) -> int:
        truth = self._simulation.truths[request_id].token_ids
        token_id = truth[position] if position < len(truth) else 7
        return (token_id + (self._random.random() < self._wrong)) % VOCAB_SIZE


class Drafting(Simulation):
    """Drive a scheduler whose guesses come from a draft model."""

    def __init__(self, config: SchedulerConfig, seed: int = 0, wrong: float = 0.3) -> None:
        super().__init__(config)
        assert config.speculation is not None
        assert config.speculation.draft_model is not None
        self.draft = DraftDevice(self, config.speculation.draft_model, seed, wrong)
        self.seconds = 0.0
        """What a plan of the draft model takes; a step takes one second."""
        run = self.device.run
        self.device.run = lambda plan, truths: replace(run(plan, truths), seconds=1.0)

    def step(self, overlap: int = 0) -> None:
        """Do as an engine does: commit first where the scheduler wants that, then guess, then plan."""
        while self.in_flight and self.scheduler.waits_for_commit():
            self.commit()
        plan = self.scheduler.plan_guesses()
        if plan is not None:
            self.scheduler.take_guesses(plan, self.draft.run(plan), self.seconds)
        super().step(overlap)


def drafting(
    *, step_tokens: int = STEP_TOKENS, draft_model_len: int = 64, shift: int = 0, **changes: Any
) -> SchedulerConfig:
    settings = SpeculativeConfig("draft_model", MOST, model="a model").settings(num_free_rows=1e6)
    config = make_config(**changes)
    limits = DraftModelLimits(
        max_num_batched_tokens=step_tokens,
        max_model_len=draft_model_len,
        row_alignment=config.row_alignment,
        group=next(number for number, group in enumerate(config.groups) if not group.is_bounded),
        num_groups=2,
        vocab_size=VOCAB_SIZE,
        shift=shift,
    )
    return replace(config, speculation=replace(settings, draft_model=limits))


def has_whole_group(changes: dict[str, Any]) -> bool:
    groups: Sequence[GroupConfig] = make_config(**changes).groups
    return any(not group.is_bounded for group in groups)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_tokens_equal_the_sequential_result(changes: dict[str, Any], caching: bool, overlap: int, shift: int):
    if not has_whole_group(changes):
        pytest.skip("no group keeps all its blocks")
    for seed in range(2):
        simulation = Drafting(drafting(enable_prefix_caching=caching, shift=shift, **changes), seed)
        simulation.run_arriving(workload(seed), seed, overlap)


def test_the_workloads_speculate_and_preempt():
    """The workloads above are only worth something if drafts are right and wrong, beside preemptions."""
    num_drafts, num_right, num_preemptions = counted(Drafting(drafting(**TINY), seed) for seed in range(6))
    assert num_preemptions >= 5
    assert 30 <= num_right <= num_drafts - 15


def test_right_guesses_take_fewer_steps_and_each_token_is_read_once():
    simulation = Drafting(drafting(max_num_seqs=1, max_rows=8), wrong=0.0)
    simulation.add(make_request("a", 20, max_tokens=41))
    num_steps = simulation.run()
    # A step for the prompt, then one for each five tokens: four drafts and what follows them.
    assert num_steps == 1 + 40 // (MOST + 1)
    # The last guess of each step is not read before it is certain, and the last two tokens never are.
    assert simulation.draft.num_tokens <= 61


def test_a_head_reads_what_it_guessed_anew():
    """It had no features of those tokens."""
    simulation = Drafting(drafting(max_num_seqs=1, max_rows=8, shift=1), wrong=0.0)
    simulation.add(make_request("a", 20, max_tokens=41))
    assert simulation.run() == 1 + 40 // (MOST + 1)
    # Of 61 tokens the first is never read, nor are the last two; and of four guesses each time three are read twice.
    assert 58 < simulation.draft.num_tokens <= 58 + 3 * 40 // (MOST + 1)


def test_a_prompt_that_others_have_had_is_not_read_again():
    prompt = [index % VOCAB_SIZE for index in range(21)]
    simulation = Drafting(drafting(max_num_seqs=1, max_rows=8), wrong=0.0)
    simulation.add(make_request("a", prompt, max_tokens=8))
    simulation.run()
    before = simulation.draft.num_tokens
    simulation.add(make_request("b", [*prompt, 1, 2], max_tokens=8, seed=3))
    simulation.run()
    assert simulation.draft.num_tokens - before <= 3 + 8 + 1  # the prompt's last block, and the answer
    simulation.scheduler.reset_prefix_cache()


def test_nobody_waits_for_guesses_with_an_unread_prompt():
    """A draft model runs no steps while a request waits for its first token."""
    simulation = Drafting(drafting(max_num_seqs=2, max_rows=16, max_num_batched_tokens=8), wrong=0.0)
    simulation.add(make_request("a", 4, max_tokens=40))
    simulation.step()
    assert simulation.scheduler.plan_guesses() is not None
    simulation.add(make_request("b", 30, max_tokens=20))
    assert simulation.scheduler.plan_guesses() is None
    simulation.step()
    assert simulation.scheduler.plan_guesses() is None
    while not simulation.seen["b"].token_ids:
        assert simulation.scheduler.plan_guesses() is None
        simulation.step()
    assert simulation.scheduler.plan_guesses() is not None
    simulation.run()


def test_chunks_of_a_request_share_what_has_not_changed():
    """A runner writes settings and blocks anew only for others than it has."""
    simulation = Drafting(drafting(max_num_seqs=2, max_rows=16), wrong=0.0)
    for name in "ab":
        simulation.add(make_request(name, 4, max_tokens=40))
    chunks: list[Chunk] = []
    run = simulation.draft.run
    simulation.draft.run = lambda plan: (
        chunks.extend(chunk for step in plan.steps for chunk in step.chunks),
        run(plan),
    )[1]
    simulation.run()
    for name in "ab":
        of_request = [chunk for chunk in chunks if chunk.request_id == name]
        assert len(of_request) > 20
        assert len({id(chunk.owner) for chunk in of_request}) == 1
        pairs = list(itertools.pairwise(chunk.block_ids for chunk in of_request))
        assert all((one is other) == (one == other) for one, other in pairs)
        assert {one is other for one, other in pairs} == {True, False}


def test_a_long_prompt_is_read_in_several_steps():
    simulation = Drafting(drafting(step_tokens=8, max_num_seqs=1, max_rows=8), wrong=0.0)
    simulation.add(make_request("a", 30, max_tokens=30))
    simulation.step()
    sizes = []
    while (plan := simulation.scheduler.plan_guesses()) is not None and len(plan.steps) == 1:
        sizes.append(plan.steps[0].num_tokens)
        simulation.scheduler.take_guesses(plan, simulation.draft.run(plan), 0.0)
        Simulation.step(simulation)
    assert sizes == [8, 8, 8, 8]
    assert plan is not None
    simulation.scheduler.take_guesses(plan, simulation.draft.run(plan), 0.0)
    simulation.run()


def test_guesses_end_with_the_context_of_the_draft_model():
    simulation = Drafting(drafting(draft_model_len=32, max_num_seqs=1, max_rows=8), wrong=0.0)
    simulation.add(make_request("a", 20, max_tokens=40))
    simulation.run()
    stats = simulation.scheduler.stats().speculation
    assert stats is not None
    assert 8 <= stats.num_draft_tokens <= 12


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.2, 40, 200), (20.0, 1, 40)])
def test_guesses_that_take_too_long_are_not_made(seconds: float, least: int, most: int):
    """A draft that takes as long as ten tokens is not made again, but for a look now and then."""
    simulation = Drafting(drafting(max_num_seqs=1, max_rows=8), wrong=0.0)
    simulation.seconds = seconds
    for name in "abcde":
        simulation.add(make_request(name, 4, max_tokens=40))
        simulation.run()
    stats = simulation.scheduler.stats().speculation
    assert stats is not None
    assert least <= stats.num_draft_tokens <= most


def about_to_guess() -> tuple[Drafting, DraftPlan]:
    """Return a simulation whose only request has a token, and the plan of its guesses."""
    simulation = Drafting(drafting(max_num_seqs=1, max_rows=8), wrong=0.0)
    simulation.add(make_request("a", 4, max_tokens=40))
    simulation.step()
    plan = simulation.scheduler.plan_guesses()
    assert plan is not None
    return simulation, plan


def test_ids_that_the_model_does_not_know_are_no_drafts():
    simulation, plan = about_to_guess()
    simulation.scheduler.take_guesses(plan, [[1], [2], [VOCAB_SIZE], [3]], 0.0)
    assert simulation.scheduler._speculation is not None
    ((request, guesses),) = simulation.scheduler._speculation._guesses.items()
    assert guesses.after(request.token_ids).tolist() == [1, 2]


def test_guesses_that_wait_for_a_plan_are_not_made_again():
    """A step may not be planned though guesses are there, as while a grammar's mask is late."""
    simulation, plan = about_to_guess()
    simulation.scheduler.take_guesses(plan, simulation.draft.run(plan), 0.0)
    assert simulation.scheduler.plan_guesses() is None
    assert simulation.scheduler.plan(late=["a"]) is None
    planned = simulation.plan()
    assert planned is not None
    assert planned.chunks[0].num_drafts == MOST
    simulation.commit()
    simulation.run()


@pytest.mark.parametrize(("draft_model_len", "max_rows"), [(8, 8), (64, 2)], ids=["context", "rows"])
def test_no_step_waits_for_guesses_that_cannot_be_made(draft_model_len: int, max_rows: int):
    """Nor do steps where it has long been time to see whether guesses would pay."""
    config = drafting(draft_model_len=draft_model_len, max_num_seqs=2, max_rows=max_rows)
    simulation = Drafting(config, wrong=0.0)
    for turn in range(3):
        for name in "ab":
            simulation.add(make_request(f"{name}{turn}", 10, max_tokens=50))
        while min(len(simulation.seen[f"{name}{turn}"].token_ids) for name in "ab") < 40:
            assert not simulation.scheduler.waits_for_commit()
            simulation.step(overlap=1)
        simulation.run()

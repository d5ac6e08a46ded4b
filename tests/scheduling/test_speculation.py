"""Drafts change no token, take no more than what is left, and are counted."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from typing import Any

import pytest

from jaxllm.config.speculative import SpeculativeConfig
from jaxllm.scheduling.config import SchedulerConfig, StepTarget
from jaxllm.scheduling.plan import StepPlan
from tests.scheduling.simulation import Simulation, make_config, make_request
from tests.scheduling.test_simulation import CHANGES, SIGHTS, TINY, with_pictures, workload

pytestmark = pytest.mark.scheduling

MOST = 4


class Oracle:
    """Guesses what the fake model says, and is wrong with a probability."""

    def __init__(self, simulation: Simulation, seed: int, wrong: float) -> None:
        self._simulation, self._random, self._wrong = simulation, random.Random(seed), wrong
        self.num_learned = 0

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        prefix = token_ids.tolist()
        known = next(
            (truth.token_ids for truth in self._simulation.truths.values() if truth.token_ids[: len(prefix)] == prefix),
            prefix,
        )
        guesses = known[len(prefix) :][:at_most] or [7]
        return array("i", [(tokens + (self._random.random() < self._wrong)) % 50 for tokens in guesses])

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        self.num_learned += 1


class Speculating(Simulation):
    """Drive a scheduler that speculates."""

    def __init__(self, config: SchedulerConfig, seed: int = 0, wrong: float = 0.3) -> None:
        super().__init__(config)
        assert self.scheduler._speculation is not None
        self.speculation = self.scheduler._speculation
        self.speculation._drafter = self.oracle = Oracle(self, seed, wrong)

    def step(self, overlap: int = 0) -> None:
        """Do as `Simulation.step`, but commit first where the scheduler wants that, as an engine does."""
        while self.in_flight and self.scheduler.waits_for_commit():
            self.commit()
        super().step(overlap)


def speculating(num_free_rows: float = 1e6, **changes: Any) -> SchedulerConfig:
    return make_config(speculation=SpeculativeConfig("ngram", MOST).settings(num_free_rows), **changes)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_tokens_equal_the_sequential_result(changes: dict, caching: bool, policy: str, overlap: int):
    for seed in range(2):
        simulation = Speculating(speculating(enable_prefix_caching=caching, policy=policy, **changes), seed)
        simulation.run_arriving(workload(seed), seed, overlap)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("changes", [SIGHTS[name] for name in ("roomy", "tiny", "tiny-both-sides", "states")])
def test_tokens_that_follow_pictures_equal_the_sequential_result(changes: dict, overlap: int):
    for seed in range(2):
        simulation = Speculating(speculating(**changes), seed)
        simulation.run_arriving(with_pictures(workload(seed), seed), seed, overlap)


def counted(simulations: Iterable[Simulation]) -> tuple[int, int, int]:
    """Run a workload in each; return how many drafts were made, how many were right, and how many preemptions."""
    num_drafts = num_right = num_preemptions = 0
    for seed, simulation in enumerate(simulations):
        for request in workload(seed):
            simulation.add(request)
        simulation.run(overlap=1)
        stats = simulation.scheduler.stats()
        assert stats.speculation is not None
        num_drafts += stats.speculation.num_draft_tokens
        num_right += stats.speculation.num_accepted_tokens
        num_preemptions += stats.num_preemptions
    return num_drafts, num_right, num_preemptions


def test_the_workloads_speculate_and_preempt():
    """The workloads above are only worth something if drafts are right and wrong, beside preemptions."""
    num_drafts, num_right, num_preemptions = counted(Speculating(speculating(**TINY), seed) for seed in range(3))
    assert num_preemptions >= 5
    assert 30 <= num_right <= num_drafts - 30


def test_right_drafts_take_fewer_steps():
    simulation = Speculating(speculating(max_num_seqs=1, max_rows=8), wrong=0.0)
    simulation.add(make_request("a", 5, max_tokens=50))
    num_steps = simulation.run()
    assert num_steps < 20
    stats = simulation.scheduler.stats().speculation
    assert stats is not None
    # Each step samples one token that was no draft.
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 50 - num_steps
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_accepted_tokens_per_pos == sorted(stats.num_accepted_tokens_per_pos, reverse=True)


def test_wrong_drafts_end():
    """A drafter that is always wrong costs a few rows, then none."""
    simulation = Speculating(speculating(), wrong=1.0)
    simulation.add(make_request("a", 5, max_tokens=50))
    simulation.run(overlap=1)
    stats = simulation.scheduler.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens == 0
    assert 0 < stats.num_draft_tokens < 20


@pytest.mark.parametrize(("reason", "num_learned"), [("abort", 0), ("error", 0), ("stop", 1)])
def test_guesses_end_with_their_request_and_only_whole_answers_are_learned(reason: str, num_learned: int):
    simulation = Speculating(speculating())
    simulation.add(make_request("a", 5, max_tokens=50))
    for _ in range(3):
        simulation.step()
    assert len(simulation.speculation._guesses) == 1
    simulation.scheduler.end("a", reason)
    assert not simulation.speculation._guesses
    assert simulation.oracle.num_learned == num_learned


def test_full_steps_have_no_drafts():
    """Where rows are dear, drafts that may be wrong do not pay."""
    simulation = Speculating(speculating(num_free_rows=0.1))
    for name in "abcdef":
        simulation.add(make_request(name, 5, max_tokens=30))
    simulation.run()
    stats = simulation.scheduler.stats().speculation
    assert stats is not None
    assert stats.num_drafts == 0


def planned(plan: StepPlan | None) -> dict[str, int]:
    assert plan is not None
    return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def test_drafts_take_what_prompts_leave():
    """A prompt gets as much of a step as if there were no drafts."""
    simulation = Speculating(speculating(max_num_batched_tokens=16, max_num_seqs=2, max_rows=8), wrong=0.0)
    simulation.add(make_request("a", 4, max_tokens=40))
    simulation.step()
    simulation.add(make_request("b", 30, max_tokens=4))
    assert planned(simulation.plan()) == {"a": 1, "b": 15}
    simulation.commit()
    assert planned(simulation.plan()) == {"a": 1, "b": 15}
    simulation.commit()
    drafts = planned(simulation.plan())
    assert drafts["a"] > 1
    simulation.commit()
    simulation.run()


def test_drafts_beside_prompts_keep_the_goal_of_streams():
    """Prompts and drafts together take what the goal leaves them; drafts alone take what they like."""
    simulation = Speculating(speculating(step_target=StepTarget(0.0265), max_rows=40), wrong=0.0)
    for name in "abcd":
        simulation.add(make_request(name, 4, max_tokens=58))
    for _ in range(3):
        simulation.step()
    simulation.add(make_request("late", 60, max_tokens=4))
    sizes, num_alone = list[int](), 0
    while simulation.live:
        is_read = bool(simulation.scheduler._prompts.reading or len(simulation.scheduler._waiting))
        plan = simulation.plan()
        assert plan is not None
        sizes += [plan.num_tokens] if is_read else []
        num_alone += plan.num_tokens - len(plan.chunks) if not is_read else 0
        simulation.commit()
    assert len(sizes) >= 3
    assert max(sizes) <= 24  # of 1 ms each, after the first 2
    assert num_alone


def test_drafts_stop_short_of_the_end():
    """No row samples a token that the request may not have."""
    simulation = Speculating(speculating(), wrong=0.0)
    simulation.add(make_request("a", 4, max_tokens=3))
    simulation.step()
    assert planned(simulation.plan()) == {"a": 2}  # one draft: of two tokens to come
    simulation.commit()
    assert not simulation.live

"""Forks share, copy, take over or recompute blocks, and get on whatever becomes of their donor."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from jaxllm.core_messages import RequestError
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager, PrefixHit, common_length
from jaxllm.scheduling.plan import StepPlan
from jaxllm.scheduling.scheduler import Scheduler
from tests.scheduling.simulation import Simulation, make_config, make_request, state_of

pytestmark = pytest.mark.scheduling

PROMPT = list(range(1, 11))
"""A prompt of two full blocks of 4, and 2 tokens in a third."""


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """List (request, start, tokens) of each row."""
    return [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] if plan else []


def add_siblings(simulation: Simulation, n: int, prompt: list[int] = PROMPT, **params: object) -> None:
    """Add n requests as n > 1 does: all but the first fork the first."""
    for i in range(n):
        fork_of = None if i == 0 else "0"
        simulation.add(make_request(str(i), prompt, seed=i, fork_of=fork_of, **params))  # pyright: ignore[reportArgumentType]


def park(simulation: Simulation, request_id: str = "donor", prompt: list[int] = PROMPT) -> None:
    """Let a request end and keep its blocks."""
    simulation.add(make_request(request_id, prompt, max_tokens=1, keeps_blocks=True))
    simulation.run()
    assert request_id in simulation.scheduler.cache.parked


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 4, 5, 10, 12, 30])
@pytest.mark.parametrize("n", [2, 5])
def test_siblings_plan_the_prompt_once(n: int, num_prompt_tokens: int, overlap: int, caching: bool):
    simulation = Simulation(make_config(max_num_batched_tokens=16, enable_prefix_caching=caching))
    add_siblings(simulation, n, list(range(1, num_prompt_tokens + 1)))
    num_planned, num_copies, started = 0, 0, set()
    while len(started) < n:
        plan = simulation.plan()
        assert plan is not None
        num_copies += len(plan.copies[0])
        for chunk in plan.chunks:
            if chunk.start < num_prompt_tokens:
                num_planned += len(chunk.token_ids)
                started |= {chunk.request_id} if chunk.samples else set()
        while len(simulation.in_flight) > overlap:
            simulation.commit()
    assert num_planned == num_prompt_tokens + (n - 1)
    assert num_copies == (n - 1 if (num_prompt_tokens - 1) % 4 else 0)
    simulation.run(overlap)


def test_a_fork_waits_for_its_donors_prompt_and_others_pass():
    simulation = Simulation(make_config(long_prefill_token_threshold=6))
    add_siblings(simulation, 2)
    simulation.add(make_request("other", 3))
    assert shape(simulation.plan()) == [("0", 0, 6), ("other", 0, 3)]
    assert shape(simulation.plan()) == [("other", 3, 1), ("0", 6, 4)]
    plan = simulation.plan()
    assert plan is not None
    assert shape(plan) == [("other", 4, 1), ("0", 10, 1), ("1", 9, 1)]
    donor, fork = plan.chunks[1].block_ids[0], plan.chunks[2].block_ids[0]
    assert donor[:2] == fork[:2]
    assert plan.copies == (((donor[2], fork[2]),),)
    simulation.run(overlap=2)


def test_forks_keep_the_order():
    simulation = Simulation(make_config(max_num_seqs=2))
    add_siblings(simulation, 3, max_tokens=6)
    simulation.add(make_request("last", 3, max_tokens=2))
    order = []
    while simulation.scheduler.has_unfinished_requests():
        order += [request_id for request_id, _, _ in shape(simulation.plan())]
        simulation.commit()
    assert [name for name in dict.fromkeys(order) if name != "last"] == ["0", "1", "2"]
    assert list(dict.fromkeys(order)).index("last") == 1, "it could pass those that waited for their donor"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("changes", [{"max_num_seqs": 1}, {"num_blocks": 17}, {"num_blocks": 17, "max_num_seqs": 1}])
def test_siblings_get_on_in_little_room(changes: dict, caching: bool, overlap: int):
    simulation = Simulation(make_config(enable_prefix_caching=caching, **changes))
    add_siblings(simulation, 5, list(range(30)), max_tokens=34)
    simulation.run(overlap)
    assert simulation.scheduler.stats().num_blocks_in_use == 0


def test_a_fork_that_is_alone_goes_on_where_its_donor_ended():
    """The donor has ended before there is a place for its fork, which therefore is waited for."""
    simulation = Simulation(make_config(max_num_seqs=1, enable_prefix_caching=False))
    add_siblings(simulation, 2, max_tokens=2)
    while simulation.live != ["1"]:
        simulation.step()
    plan = simulation.plan()
    assert plan is not None
    assert (shape(plan), plan.copies) == ([("1", 9, 1)], ((),))
    simulation.run()


def test_a_fork_whose_donor_has_gone_uses_the_prefix_cache():
    simulation = Simulation(make_config())
    add_siblings(simulation, 2)
    simulation.plan()
    simulation.abort(["0"])
    assert shape(simulation.plan()) == [("1", 8, 2)]
    simulation.add(make_request("2", PROMPT, fork_of="never came"))
    assert ("2", 8, 2) in shape(simulation.plan())
    simulation.run(overlap=2)


def test_a_fork_of_another_salt_shares_nothing():
    simulation = Simulation(make_config())
    park(simulation)
    simulation.add(make_request("1", PROMPT, fork_of="donor", salt="salt"))
    assert shape(simulation.plan()) == [("1", 0, 10)]


def test_prompts_of_other_lengths_share_nothing_if_keys_depend_on_them():
    simulation = Simulation(make_config(enable_prefix_caching=False, keys_depend_on_prompt=True))
    park(simulation)
    simulation.add(make_request("longer", [*PROMPT, 40], fork_of="donor"))
    simulation.add(make_request("as long", [*PROMPT[:9], 40], fork_of="donor"))
    assert shape(simulation.plan()) == [("as long", 9, 1), ("longer", 0, 11)]


def test_a_fork_shares_even_when_it_may_not_read_the_prefix_cache():
    simulation = Simulation(make_config())
    simulation.add(make_request("before", PROMPT))
    simulation.run()
    add_siblings(simulation, 2, skip_reading_prefix_cache=True)
    assert shape(simulation.plan()) == [("0", 0, 10)]
    assert shape(simulation.plan()) == [("0", 10, 1), ("1", 9, 1)]
    simulation.run(overlap=2)


# -- parked tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_beams_compute_one_token_each(caching: bool):
    """Beam search does this: every step forks ended requests, each by one token, and lets go of them."""
    simulation = Simulation(make_config(enable_prefix_caching=caching))
    park(simulation, "root")
    beams = [("root", PROMPT)]
    for depth in range(6):
        children = [(f"{depth}.{i}", [*beams[i % len(beams)][1], 40 + i], beams[i % len(beams)][0]) for i in range(3)]
        for name, tokens, parent in children:
            simulation.add(make_request(name, tokens, max_tokens=1, fork_of=parent, keeps_blocks=True))
        simulation.scheduler.release([name for name, _ in beams])
        plan = simulation.plan()
        assert plan is not None
        assert plan.num_tokens == 3
        # The last child of each parent takes its last block over, and one that begins a new block copies nothing.
        assert len(plan.copies[0]) == (0 if (10 + depth) % 4 == 0 else 3 - len(beams))
        simulation.commit()
        simulation.check()
        assert simulation.scheduler.cache.parked.keys() == {name for name, _, _ in children}
        beams = [(name, tokens) for name, tokens, _ in children]
    simulation.scheduler.release([name for name, _ in beams])
    assert simulation.scheduler.stats().num_blocks_in_use == 0


def test_a_shorter_fork_does_not_take_over_a_block_that_can_be_found():
    simulation = Simulation(make_config())
    park(simulation)
    simulation.add(make_request("1", [*PROMPT[:6], 40], fork_of="donor"))
    simulation.scheduler.release(["donor"])
    plan = simulation.plan()
    assert plan is not None
    assert (shape(plan), len(plan.copies[0])) == ([("1", 6, 1)], 1)
    simulation.check()
    assert not simulation.scheduler.cache.parked
    simulation.run(overlap=1)


def test_parked_blocks_stay_until_they_are_released():
    simulation = Simulation(make_config())
    park(simulation)
    assert simulation.scheduler.stats().num_blocks_in_use == 3
    simulation.scheduler.release(["unknown", "donor", "donor"])
    assert simulation.scheduler.stats().num_blocks_in_use == 0


def test_a_release_before_the_end_counts():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", PROMPT, keeps_blocks=True))
    simulation.step()
    simulation.scheduler.release(["a"])
    simulation.run()
    assert not simulation.scheduler.cache.parked


@pytest.mark.parametrize(("finish_reason", "parks"), [("stop", True), ("abort", False), ("error", False)])
def test_blocks_are_kept_at_a_proper_end_only(finish_reason: str, parks: bool):
    simulation = Simulation(make_config())
    simulation.add(make_request("a", PROMPT, keeps_blocks=True))
    simulation.step()
    simulation.end("a", finish_reason)
    assert ("a" in simulation.scheduler.cache.parked) == parks


def test_an_id_that_comes_again_replaces_what_was_parked():
    simulation = Simulation(make_config())
    park(simulation)
    park(simulation, prompt=[7, 7])
    assert simulation.scheduler.stats().num_blocks_in_use == 1


def test_parked_tables_go_before_anyone_waits_the_oldest_first():
    simulation = Simulation(make_config(num_blocks=17))
    for i in range(5):
        park(simulation, str(i), [i] * 11)
    simulation.add(make_request("long", 19, max_tokens=20))
    assert shape(simulation.plan()) == [("long", 0, 19)]
    assert list(simulation.scheduler.cache.parked) == ["2", "3", "4"]
    simulation.run()
    assert list(simulation.scheduler.cache.parked) == ["3", "4"]
    assert simulation.scheduler.stats().num_preemptions == 0


def test_a_fork_gives_up_its_own_donor_last():
    simulation = Simulation(make_config(num_blocks=17))
    for name in ("donor", "other"):
        park(simulation, name, [ord(name[0]) % 50] * 30)
    simulation.add(make_request("fork", [0] * 30, max_tokens=2, fork_of="donor"))
    plan = simulation.plan()
    assert plan is not None
    assert (shape(plan), list(simulation.scheduler.cache.parked)) == ([("fork", 29, 1)], ["donor"])
    simulation.run(overlap=1)


def test_a_fork_gives_up_its_donor_rather_than_wait():
    simulation = Simulation(make_config(num_blocks=17, enable_prefix_caching=False))
    park(simulation, prompt=list(range(60)))
    simulation.add(make_request("fork", [*range(3), *range(10, 65)], fork_of="donor"))
    assert shape(simulation.plan()) == [("fork", 0, 58)]
    assert not simulation.scheduler.cache.parked
    simulation.run(overlap=1)


@pytest.mark.parametrize(
    "forget",
    [Scheduler.reset_prefix_cache, lambda scheduler: scheduler.abandon(RequestError("internal", "a step failed"))],
    ids=["reset_prefix_cache", "abandon"],
)
def test_parked_tables_are_forgotten_with_the_cache(forget: Callable[[Scheduler], object]):
    simulation = Simulation(make_config())
    park(simulation)
    simulation.add(make_request("fork", PROMPT, fork_of="donor"))
    forget(simulation.scheduler)
    assert simulation.scheduler.stats().num_blocks_in_use == simulation.scheduler.cache.groups[0].pool.num_cached == 0
    simulation.scheduler.check()


def test_a_donor_admitted_in_the_same_step_passes_the_source_of_its_copy_on():
    simulation = Simulation(make_config(enable_prefix_caching=False))
    add_siblings(simulation, 2, max_tokens=9)
    for _ in range(3):
        simulation.step()
    simulation.add(make_request("2", PROMPT, fork_of="1"))
    simulation.scheduler._preempt(simulation.scheduler._requests["1"])
    plan = simulation.plan()
    assert plan is not None
    assert [(name, start) for name, start, _ in shape(plan)] == [("0", 12), ("2", 9), ("1", 10)]
    ((source, _), (same_source, _)) = plan.copies[0]
    assert source == same_source == plan.chunks[0].block_ids[0][2]
    simulation.run(overlap=1)


# -- what ends or moves while others share -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["abort", "end", "preempt"])
@pytest.mark.parametrize("victims", ["0", "1", "01", "12", "012"])
@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("overlap", [0, 1])
def test_anything_may_become_of_donor_and_forks(overlap: int, num_steps: int, victims: str, what: str):
    simulation = Simulation(make_config(enable_prefix_caching=len(victims) > 1))
    add_siblings(simulation, 4, max_tokens=6)
    for _ in range(num_steps):
        simulation.step(overlap)
    in_flight = {chunk.request_id for plan, _ in simulation.in_flight for chunk in plan.chunks}
    for name in victims:
        is_running = state_of(simulation.scheduler, name) == "running"
        if what == "abort":
            simulation.abort([name])
        elif what == "end":
            simulation.end(name, "stop")
        elif is_running and name not in in_flight:
            simulation.scheduler._preempt(simulation.scheduler._requests[name])
        simulation.check()
    simulation.run(overlap)
    assert simulation.scheduler.stats().num_blocks_in_use == 0


# -- the simulation notices --------------------------------------------------------------------------------------------


def share_what_should_be_copied(hit: PrefixHit) -> PrefixHit:
    if hit.copied_blocks is None:
        return hit
    shared = array("i", [*hit.block_ids[0], *hit.copied_blocks])
    return replace(hit, block_ids=(shared,), copied_blocks=None)


def copy_nothing(hit: PrefixHit) -> PrefixHit:
    return replace(hit, copied_blocks=None)


def copy_the_wrong_block(hit: PrefixHit) -> PrefixHit:
    return replace(hit, copied_blocks=hit.copied_blocks and (hit.block_ids[0][0],))


def share_the_wrong_block(hit: PrefixHit) -> PrefixHit:
    return replace(hit, block_ids=(hit.block_ids[0][::-1],))


def claim_a_token_more(hit: PrefixHit) -> PrefixHit:
    return replace(hit, num_tokens=hit.num_tokens + (hit.num_tokens == 6))


BREAKS = [
    share_what_should_be_copied,
    copy_nothing,
    copy_the_wrong_block,
    share_the_wrong_block,
    claim_a_token_more,
]


@pytest.mark.parametrize("break_it", [None, *BREAKS])
def test_a_broken_share_or_copy_shows(monkeypatch: pytest.MonkeyPatch, break_it):
    """The simulated device alone must notice; the scheduler's own laws are not asked."""
    find = KVCacheManager.find_prefix
    if break_it is not None:
        monkeypatch.setattr(
            KVCacheManager, "find_prefix", lambda self, *args, **kwargs: break_it(find(self, *args, **kwargs))
        )
    simulation = Simulation(make_config(enable_prefix_caching=False))
    add_siblings(simulation, 3)
    simulation.add(make_request("3", [*PROMPT[:6], 40, 41], fork_of="0", max_tokens=9))

    def run() -> None:
        while simulation.scheduler.has_unfinished_requests():
            simulation.step()

    if break_it is None:
        return run()
    with pytest.raises(AssertionError, match=r"reads a slot with wrong content|two rows write to one slot"):
        run()
    return None


@pytest.mark.parametrize("at_most", range(8))
@pytest.mark.parametrize("num_equal", range(7))
def test_common_length(num_equal: int, at_most: int):
    left, right = array("i", range(6)), array("i", [*range(num_equal), *([9] * (7 - num_equal))])
    assert common_length(left, right, at_most) == min(num_equal, 6, at_most)


def steps_of_search(simulation: Simulation, width: int, num_tokens: int, lag: int, others: Callable[[], None]) -> int:
    """Search beside `others`, which come before each step; return how many engine steps the search takes.

    Each of its steps reaches the scheduler `lag` engine steps after the one before has ended, as a front end needs.
    """
    num_steps, prompt, parents = 0, list(PROMPT), list[str]()
    for token in range(num_tokens):
        names = [f"search {token} {index}" for index in range(width if token else 1)]
        for index, name in enumerate(names):
            fork_of = parents[index % len(parents)] if parents else None
            fields: dict[str, Any] = {"arrival": 5, "fork_of": fork_of, "keeps_blocks": True, "priority": 1}
            request = make_request(name, [*prompt, *range(token)], max_tokens=1, **fields)
            simulation.add(replace_struct(request, num_seats=1 if token else width))
        simulation.scheduler.release(parents)
        parents = names
        while set(names) & set(simulation.live):
            simulation.step()
            simulation.check()
            num_steps += 1
            assert num_steps < 1000, "the search starves"
        for _ in range(lag):
            others()
            simulation.step()
            num_steps += 1
    simulation.scheduler.release(parents)
    return num_steps


@pytest.mark.parametrize("num_prompt_tokens", [3, 60])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_beam_search_keeps_its_place_beside_others(policy: Any, num_prompt_tokens: int) -> None:
    """More others come than there are seats, with prompts of several steps: the search takes as long as alone."""
    lag, num_tokens = 2, 8

    def search(num_before: int, num_each: int) -> int:
        names = itertools.count(100)
        simulation = Simulation(make_config(max_num_seqs=6, max_num_batched_tokens=16, num_blocks=200, policy=policy))

        def others(count: int = num_each) -> None:
            for name in itertools.islice(names, count):
                request = make_request(str(name), num_prompt_tokens, max_tokens=30, arrival=name, priority=1)
                simulation.add(replace_struct(request, arrival_time=1.0))

        for name in range(num_before):
            simulation.add(make_request(f"before {name}", 3, max_tokens=30, arrival=name, priority=1))
        others(3 * num_each)
        return steps_of_search(simulation, 3, num_tokens, lag, others)

    alone = search(0, 0)
    assert alone == num_tokens * (1 + lag)
    assert search(0, 3) <= alone + 1
    assert search(2, 3) <= alone + 3


def test_a_search_that_is_given_up_holds_no_seat() -> None:
    """Nobody releases its steps, as when an event loop is closed under it: its seats are free after a while."""
    simulation = Simulation(make_config(max_num_seqs=1))
    park(simulation)
    simulation.add(make_request("next", 3, arrival=1))
    assert simulation.scheduler.plan() is None
    simulation.now = 2.0
    assert shape(simulation.plan()) == [("next", 0, 3)]

"""Recurrent state: snapshots are taken where they are of use, found, shared, and given up; no step is hurt by them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxllm.scheduling.cache.state_slots import NO_SLOT, StateSlots
from tests.scheduling.simulation import Simulation, make_config, make_request
from tests.scheduling.test_simulation import TINY, workload

SLOTS: dict[str, Any] = {"num_state_slots": 33, "num_blocks": 1025}


def ids(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(num_tokens)]


def hits(simulation: Simulation) -> int:
    return simulation.scheduler.stats().prefix_cache_hits


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_prompt_that_comes_again_hits_its_last_whole_block(overlap: int):
    simulation = Simulation(make_config(**SLOTS))
    requests = [request for request in workload(0) if request.cache_salt is None and request.fork_of is None]
    num_hits = []
    for turn in range(2):
        for request in requests:
            simulation.add(make_request(f"{turn} {request.request_id}", request.prompt_token_ids, max_tokens=2))
            simulation.run(overlap)
        num_hits.append(hits(simulation))
    assert num_hits[1] - num_hits[0] == sum((len(request.prompt_token_ids) - 1) // 4 * 4 for request in requests)


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_end_of_what_prompts_share_is_found_from_the_third_on(overlap: int):
    simulation = Simulation(make_config(**SLOTS))
    shared, results = ids(1, 23), []
    for number in range(4):
        simulation.add(make_request(str(number), shared + ids(10 + number, 9), max_tokens=3))
        before = hits(simulation)
        simulation.run(overlap)
        results.append(hits(simulation) - before)
    assert results == [0, 0, 20, 20]


def test_a_request_that_returns_goes_on_from_its_prompts_snapshot():
    simulation = Simulation(make_config(**{**TINY, "num_state_slots": 20}))
    for number in range(4):
        simulation.add(make_request(str(number), ids(number, 13), max_tokens=40))
    simulation.run()
    num_tokens = sum(13 + 40 - 1 for _ in range(4))
    stats = simulation.scheduler.stats()
    assert stats.num_preemptions
    assert stats.num_scheduled_tokens < num_tokens + stats.num_preemptions * 53
    assert simulation.scheduler.cache.slots is not None
    assert simulation.scheduler.cache.slots.pool.num_cached > 0


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 8, 9, 30])
def test_forks_go_on_from_the_token_before_their_last(num_prompt_tokens: int):
    simulation = Simulation(make_config(enable_prefix_caching=False, **SLOTS))
    prompt = ids(3, num_prompt_tokens)
    simulation.add(make_request("first", prompt, max_tokens=9))
    for number in range(3):
        simulation.add(make_request(str(number), prompt, fork_of="first", seed=number, max_tokens=9))
    simulation.run(overlap=1)
    assert simulation.scheduler.stats().num_scheduled_tokens <= num_prompt_tokens + 3 + 4 * 9


def test_a_fork_of_a_request_that_has_ended_reads_its_last_state():
    simulation = Simulation(make_config(enable_prefix_caching=False, **SLOTS))
    simulation.add(make_request("first", ids(4, 18), max_tokens=1, keeps_blocks=True))
    simulation.run()
    before = simulation.scheduler.stats().num_scheduled_tokens
    simulation.add(make_request("next", [*ids(4, 18), 7], fork_of="first", max_tokens=1))
    simulation.run()
    assert simulation.scheduler.stats().num_scheduled_tokens == before + 1


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("num_prompt", "num_output"), [(9, 30), (8, 6), (3, 2), (7, 13)])
def test_the_next_turn_of_a_chat_goes_on_from_the_answer(overlap: int, num_prompt: int, num_output: int):
    simulation = Simulation(make_config(**SLOTS))
    simulation.add(make_request("turn 0", ids(5, num_prompt), max_tokens=num_output))
    simulation.run(overlap)
    before = hits(simulation)
    history = [*ids(5, num_prompt), *simulation.seen["turn 0"].token_ids]
    simulation.add(make_request("turn 1", [*history, *ids(6, 7)], max_tokens=2))
    simulation.run(overlap)
    assert hits(simulation) - before == (len(history) - 1) // 4 * 4


def test_an_answer_has_one_snapshot_and_many_answers_none():
    simulation = Simulation(make_config(max_num_seqs=8, num_state_slots=11, num_blocks=1025))
    slots = simulation.scheduler.cache.slots
    assert slots is not None
    simulation.add(make_request("alone", ids(7, 3), max_tokens=40))
    simulation.run(overlap=1)
    assert slots.pool.num_cached == 1
    for number in range(8):
        simulation.add(make_request(str(number), ids(10 + number, 3), max_tokens=40))
    simulation.run(overlap=1)
    assert slots.pool.num_cached == 1


def test_without_a_free_slot_nothing_is_saved_and_all_goes_on():
    simulation = Simulation(make_config(max_num_seqs=4, num_state_slots=5))
    for number in range(9):
        simulation.add(make_request(str(number), ids(number, 14), max_tokens=5))
    simulation.run(overlap=1)
    assert all(seen.finish_reason for seen in simulation.seen.values())


class TestSlots:
    def test_what_a_plan_uses_is_not_taken_before_the_next(self):
        slots = StateSlots(4)
        state = slots.open(NO_SLOT, 0)
        turn = slots.plan_chunk(state, 8, 8, is_held=False, reserve=0)
        slots.pool.register(turn.save, b"hash", b"tokens")
        assert slots.pool.num_available == 1
        slots.begin_plan()
        assert slots.pool.num_available == 2
        other = slots.open(turn.save, 8)
        slots.close(state)
        assert slots.pool.num_available == 1
        slots.check([other])
        slots.begin_plan()
        assert slots.pool.num_available == 2
        assert slots.pool.find(b"hash", b"tokens") == turn.save

    def test_a_snapshot_that_nobody_holds_goes_first_to_whoever_wants_a_slot(self):
        slots = StateSlots(3)
        state = slots.open(NO_SLOT, 0)
        save = slots.plan_chunk(state, 4, 4, is_held=False, reserve=0).save
        slots.pool.register(save, b"hash", b"tokens")
        slots.begin_plan()
        assert slots.fits(NO_SLOT)
        assert not slots.fits(save)
        assert slots.open(NO_SLOT, 0).slot == save
        assert slots.pool.find(b"hash", b"tokens") is None

    @pytest.mark.parametrize("num", [1, 2])
    def test_too_few(self, num: int):
        with pytest.raises(ValueError, match="num_state_slots must be at least 3"):
            make_config(num_state_slots=num)

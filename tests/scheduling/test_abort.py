"""An abort frees every block at once, in whatever state it finds a request, and leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxllm.core_messages import RequestError
from tests.scheduling.simulation import Simulation, make_config, make_request, state_of


def keep_waiting(simulation: Simulation, request_ids: list[str]) -> None:
    assert {state_of(simulation.scheduler, request_id) for request_id in request_ids} == {"waiting"}


def stop_mid_prefill(simulation: Simulation, request_ids: list[str]) -> None:
    while not all(simulation.num_chunks.get(request_id) for request_id in request_ids):
        simulation.step()
    assert not any(simulation.seen[request_id].token_ids for request_id in request_ids)


def decode(simulation: Simulation, request_ids: list[str]) -> None:
    while not all(len(simulation.seen[request_id].token_ids) >= 2 for request_id in request_ids):
        simulation.step()


def preempt(simulation: Simulation, request_ids: list[str]) -> None:
    decode(simulation, request_ids)
    for request_id in request_ids:
        simulation.scheduler._preempt(simulation.scheduler._requests[request_id])
    assert {state_of(simulation.scheduler, request_id) for request_id in request_ids} == {"preempted"}


def leave_in_flight(simulation: Simulation, request_ids: list[str]) -> None:
    decode(simulation, request_ids)
    plan = simulation.plan()
    assert plan is not None
    assert set(request_ids) <= {chunk.request_id for chunk in plan.chunks}


def leave_prefill_in_flight(simulation: Simulation, request_ids: list[str]) -> None:
    stop_mid_prefill(simulation, request_ids)
    assert simulation.plan() is not None


STATES = [keep_waiting, stop_mid_prefill, decode, preempt, leave_in_flight, leave_prefill_in_flight]


@pytest.mark.parametrize("with_others", [False, True], ids=["alone", "among others"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("bring_to_state", STATES)
def test_abort(bring_to_state: Callable[[Simulation, list[str]], None], n: int, with_others: bool):
    """Abort 20 times in the state, n requests with one prompt at a time."""
    config = make_config(long_prefill_token_threshold=4, max_num_batched_tokens=32)
    simulation = Simulation(config)
    for turn in range(20):
        if with_others:
            simulation.add(make_request(f"other {turn}", 5, max_tokens=6))
        request_ids = [f"{turn}_{i}" for i in range(n)]
        prompt = [(turn + i) % 50 for i in range(17)]
        for i, request_id in enumerate(request_ids):
            simulation.add(make_request(request_id, prompt, max_tokens=30, seed=i))
        bring_to_state(simulation, request_ids)
        simulation.abort(request_ids)
        simulation.check()
        assert not set(request_ids) & set(simulation.live)
        if not with_others:
            assert simulation.scheduler.stats().num_blocks_in_use == 0, "blocks are freed at once"
            assert not simulation.scheduler.has_unfinished_requests()
        while simulation.in_flight:
            assert not {output.request_id for output in simulation.commit()} & set(request_ids)
        simulation.check()
        # Give the cache no chance to skip the prefill that the next turn wants to interrupt.
        simulation.run()
        assert simulation.scheduler.reset_prefix_cache()
    assert simulation.scheduler.stats().num_blocks_in_use == 0


def test_unknown_and_ended_requests_are_ignored():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 3, max_tokens=1))
    simulation.run()
    assert simulation.scheduler.abort_requests(["a", "b"]) == []


def test_the_id_is_free_again_at_once():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 9))
    simulation.plan()
    simulation.abort(["a"])
    simulation.add(make_request("a", [1, 2, 3], seed=5))
    simulation.plan()
    assert simulation.commit() == []
    simulation.run(overlap=1)


def test_abandon_trusts_nothing():
    """What was cut off in the middle of a step may be inconsistent; afterwards all is as new."""
    simulation = Simulation(make_config())
    scheduler = simulation.scheduler
    for name in ("a", "b"):
        simulation.add(make_request(name, 9))
    assert simulation.plan() is not None
    scheduler.cache.groups[0].pool.take(3)  # lost between the pool and a table
    scheduler._running.pop()
    why = RequestError("internal", "the device fell over")
    assert [(output.request_id, output.finish_reason, output.error) for output in scheduler.abandon(why)] == [
        ("a", "error", why),
        ("b", "error", why),
    ]
    scheduler.check()
    assert scheduler.stats().num_blocks_in_use == 0
    assert not scheduler.has_unfinished_requests()
    scheduler.add_request(make_request("a", 9))
    assert scheduler.plan() is not None

"""Adapters share the device's slots: each step's have one, loads say which, and nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from jaxllm.core_messages import EngineCoreRequest
from jaxllm.scheduling.plan import StepPlan
from tests.scheduling.simulation import Simulation, make_config, make_request

pytestmark = pytest.mark.scheduling

NUM_SLOTS = 2


def with_adapter(name: str, adapter: int | None, **fields: Any) -> EngineCoreRequest:
    """Return a request whose adapter is loaded."""
    request = make_request(name, 6, salt=None if adapter is None else f"adapter {adapter}", **fields)
    return msgspec.structs.replace(request, adapter=adapter)


class Slots:
    """What the device's slots hold, by what plans say."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def take(self, plan: StepPlan, adapters: dict[str, int | None]) -> None:
        """Write what a plan loads, then check that each of its chunks finds its adapter."""
        self.held |= plan.adapter_loads
        assert self.held.keys() <= set(range(1, NUM_SLOTS + 1))
        for chunk in plan.chunks:
            adapter = adapters[chunk.request_id]
            assert (self.held[chunk.owner.adapter_slot] if chunk.owner.adapter_slot else None) == adapter


def run(requests: list[EngineCoreRequest], **changes: int) -> list[list[str]]:
    """Run requests to their end; return the ids of each step."""
    config: dict[str, Any] = {"num_adapter_slots": NUM_SLOTS, **changes}
    simulation, slots = Simulation(make_config(**config)), Slots()
    adapters = {request.request_id: request.adapter for request in requests}
    for request in requests:
        simulation.add(request)
    steps = []
    while simulation.scheduler.has_unfinished_requests():
        plan = simulation.plan()
        assert plan is not None
        slots.take(plan, adapters)
        simulation.scheduler.check()
        steps.append([chunk.request_id for chunk in plan.chunks])
        simulation.commit()
    return steps


def test_an_adapter_waits_for_a_slot_and_others_pass():
    steps = run([with_adapter(name, number) for name, number in (("a", 1), ("b", 2), ("c", 3), ("d", 1), ("e", None))])
    assert steps[0] == ["a", "b", "d", "e"]
    assert next(i for i, step in enumerate(steps) if "c" in step) == 4


def test_no_more_pass_than_fill_the_engine():
    many = [with_adapter(f"{number} {i}", number, max_tokens=3 + i % 4) for i in range(40) for number in (1, 2)]
    waiting = with_adapter("waits", 3)
    steps = run([*many[:2], waiting, *many[2:]], max_num_seqs=4)
    first = next(i for i, step in enumerate(steps) if "waits" in step)
    passed = {name for step in steps[:first] for name in step} - {each.request_id for each in many[:2]}
    assert len(passed) == 4


def test_an_adapter_that_is_there_is_not_loaded_again():
    simulation, slots = Simulation(make_config(num_adapter_slots=NUM_SLOTS)), Slots()
    loads = []
    for turn, adapter in enumerate((1, 2, 1, 3, 1, 2)):
        request = with_adapter(str(turn), adapter, max_tokens=1)
        simulation.add(request)
        plan = simulation.plan()
        assert plan is not None
        slots.take(plan, {request.request_id: adapter})
        loads.append(list(plan.adapter_loads.values()))
        simulation.commit()
    assert loads == [[1], [2], [], [3], [], [2]]


def test_random_company_preemption_and_ends():
    for seed in range(20):
        rng = random.Random(seed)
        requests = [
            with_adapter(str(i), rng.choice((None, 1, 2, 3, 4)), max_tokens=rng.randint(1, 20)) for i in range(30)
        ]
        run(requests, num_blocks=rng.choice((17, 33)), max_num_seqs=rng.choice((2, 5)), max_num_batched_tokens=16)


def test_forgotten_adapters_are_loaded_again():
    """The idle ones: the slot of an adapter that runs stays."""
    simulation = Simulation(make_config(num_adapter_slots=NUM_SLOTS))

    def start(name: str, adapter: int) -> dict[int, int]:
        simulation.add(with_adapter(name, adapter, max_tokens=9 if name == "runs" else 1))
        plan = simulation.plan()
        assert plan is not None
        simulation.commit()
        return dict(plan.adapter_loads)

    [first] = start("runs", 1)
    [second] = start("a", 2)
    assert {first, second} == {1, 2}
    assert start("b", 2) == {}
    simulation.scheduler.adapters.forget_idle()
    simulation.scheduler.check()
    assert start("c", 2) == {second: 2}
    assert start("d", 1) == {}

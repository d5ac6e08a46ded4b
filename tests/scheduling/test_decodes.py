"""The requests that continue by one token each, against a scheduler that looks at each of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxllm.core_messages import EngineCoreRequest
from jaxllm.scheduling.config import GroupConfig
from jaxllm.scheduling.plan import NO_DECODES, StepPlan
from tests.scheduling.simulation import Simulation, make_config, make_request
from tests.scheduling.test_simulation import TINY, workload

WINDOW = GroupConfig(num_blocks=400, window=9)
CHUNKS = GroupConfig(num_blocks=400, attention_chunk=12)


class _Recorded(Simulation):
    """Record what is planned for each request in each step, and how many rows are decodes that continue."""

    def __init__(self, config: Any, *, continues: bool = True) -> None:
        super().__init__(config)
        self.steps: list[set[tuple[Any, ...]]] = []
        self.num_rows = self.num_continued = 0
        if not continues:
            self.scheduler._continue = lambda step, late: None

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self.num_rows += plan.num_chunks
            self.num_continued += len(plan.decodes.starts)
            self.steps.append(
                {
                    (each.request_id, each.start, *each.token_ids, each.samples, each.num_output_tokens)
                    for each in plan.chunks
                }
            )
        return plan


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("others", [[], [WINDOW], [CHUNKS]], ids=["one group", "a window", "chunks"])
def test_steps_are_the_same_as_if_each_request_is_looked_at(others: list[GroupConfig], overlap: int) -> None:
    config = make_config(num_blocks=400, max_num_batched_tokens=64, max_num_seqs=8, others=others)
    for seed in range(4):
        by_columns, one_by_one = _Recorded(config), _Recorded(config, continues=False)
        for simulation in (by_columns, one_by_one):
            simulation.run_arriving(workload(seed, 20), seed, overlap)
        assert by_columns.steps == one_by_one.steps
        assert by_columns.num_continued > by_columns.num_rows / 4
        assert one_by_one.num_continued == 0


def test_order_decides_where_blocks_are_short() -> None:
    simulation = _Recorded(make_config(**TINY))
    simulation.run_arriving(workload(0, 30), 0, 1)
    assert simulation.scheduler.stats().num_preemptions > 0
    assert 0 < simulation.num_continued < simulation.num_rows


def test_plans_of_steps_in_flight_keep_their_blocks() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 3))  # a block has four tokens
    plans = [simulation.plan() for _ in range(3)]
    assert [len(plan.chunks[0].block_ids[0]) for plan in plans if plan is not None] == [1, 1, 2]
    assert [len(plan.decodes.starts) for plan in plans if plan is not None] == [0, 1, 1]


def test_a_late_request_sits_out_and_comes_back() -> None:
    simulation = Simulation(make_config())
    for name in ("a", "b"):
        simulation.add(make_request(name, 3))
    simulation.step()
    simulation.step()
    plan = simulation.scheduler.plan(late=["a"])
    assert plan is not None
    assert [chunk.request_id for chunk in plan.chunks] == ["b"]
    simulation.in_flight.append((plan, simulation.device.run(plan, simulation.truths)))
    simulation.run()


def test_no_decodes_are_no_chunks() -> None:
    assert NO_DECODES.chunks() == []


CONFIGS = {
    "roomy": {},
    "tiny": TINY,
    "windows": {"others": [GroupConfig(num_blocks=60, window=9)], "num_blocks": 60},
    "chunks": {"others": [GroupConfig(num_blocks=60, attention_chunk=12)], "num_blocks": 60},
    "uncached": {"enable_prefix_caching": False, "num_blocks": 40},
    "priority": {"policy": "priority", "num_blocks": 40},
    "tight": {"num_blocks": 30, "max_num_batched_tokens": 8, "max_num_seqs": 8},
}


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_columns_agree_with_requests(name: str, overlap: int) -> None:
    for seed in range(2):
        rng = random.Random(f"{seed} {name} {overlap}")
        simulation = Simulation(make_config(**CONFIGS[name]))
        pending = workload(seed, 16)
        pending += [make_request(f"e{number}", 5, task="embed") for number in range(3)]
        rng.shuffle(pending)
        pending = [each for each in pending if each.fork_of is None]
        num_steps = 0
        while pending or simulation.scheduler.has_unfinished_requests():
            if pending and rng.random() < 0.3:
                simulation.add(pending.pop())
            if simulation.live and rng.random() < 0.03:
                request_id = rng.choice(simulation.live)
                simulation.abort([request_id])
                simulation.add(make_request(request_id, rng.randrange(1, 20), max_tokens=rng.randrange(1, 30)))
            if rng.random() < 0.03:
                while simulation.in_flight:
                    simulation.commit()
                simulation.scheduler.reset_prefix_cache(preempt=True)
            simulation.step(overlap)
            simulation.check()
            num_steps += 1
            assert num_steps < 4000
        while simulation.in_flight:
            simulation.commit()


def _share_of_columns(num_blocks: int, requests: list[EngineCoreRequest]) -> float:
    """Run requests, which are never preempted; return the share of rows in columns, in steps of decodes."""
    config = make_config(
        num_blocks=1 + num_blocks,
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_model_len=256,
        enable_prefix_caching=False,
    )
    simulation, num_rows, num_continued = Simulation(config), 0, 0
    for request in requests:
        simulation.add(request)
    while simulation.scheduler.has_unfinished_requests():
        plan = simulation.plan()
        if plan is not None and plan.decodes_only:
            num_rows += plan.num_chunks
            num_continued += len(plan.decodes.starts)
        while len(simulation.in_flight) > (1 if plan is not None else 0):
            simulation.commit()
    assert simulation.scheduler.stats().num_preemptions == 0
    return num_continued / num_rows


@pytest.mark.parametrize("num_blocks", [130, 300])
def test_columns_come_back_after_blocks_were_short(num_blocks: int) -> None:
    """32 requests of 4 blocks and a few free ones: a step needs about two."""
    requests = [make_request(str(i), 20 + i % 16, max_tokens=25 + i % 16) for i in range(32)]
    assert _share_of_columns(num_blocks, requests) > 0.9


def test_columns_are_used_beside_a_request_that_waits_for_its_tokens() -> None:
    """A request with a thinking budget decodes beside plain ones of 3 or 4 blocks, and needs a block at most."""
    plain = [make_request(str(i), 20 + i % 12, max_tokens=32) for i in range(31)]
    thinking = make_request("thinks", 20, max_tokens=64, thinking_token_budget=9)
    assert _share_of_columns(130, [*plain, thinking]) > 0.8

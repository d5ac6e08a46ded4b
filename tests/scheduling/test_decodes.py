"""The requests that continue by one token each, against a scheduler that looks at each of them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.scheduling.config import GroupConfig
from jaxllm.scheduling.plan import NO_DECODES, StepPlan
from tests.scheduling.simulation import Simulation, make_config, make_request
from tests.scheduling.test_simulation import TINY, workload

WINDOW = GroupConfig(num_blocks=400, window=9)


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
def test_steps_are_the_same_as_if_each_request_is_looked_at(overlap: int) -> None:
    config = make_config(num_blocks=400, max_num_batched_tokens=64, max_num_seqs=8)
    for seed in range(4):
        by_columns, one_by_one = _Recorded(config), _Recorded(config, continues=False)
        for simulation in (by_columns, one_by_one):
            simulation.run_arriving(workload(seed, 20), seed, overlap)
        assert by_columns.steps == one_by_one.steps
        assert by_columns.num_continued > by_columns.num_rows / 4
        assert one_by_one.num_continued == 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_blocks_behind_a_window_are_given_back(overlap: int) -> None:
    """Later than if each request is looked at: only once it needs another block. So more of a prefix may be found."""
    config = make_config(num_blocks=400, max_num_batched_tokens=64, max_num_seqs=8, others=[WINDOW])
    simulation = _Recorded(config)
    simulation.run_arriving(workload(0, 30), 0, overlap)
    assert simulation.num_continued > simulation.num_rows / 4
    simulation.add(make_request("long", 3, max_tokens=60))
    most = 0
    while simulation.scheduler.has_unfinished_requests():
        simulation.step(overlap)
        tables = simulation.scheduler.cache.tables.values()
        most = max([most, *(sum(map(bool, table.block_ids[1])) for table in tables)])
    assert most <= -(-9 // config.block_size) + 2


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

"""How long content stays in KV blocks, by a clock that is set by hand."""

from __future__ import annotations

import itertools

from jaxllm.core_messages import BlockEviction
from jaxllm.scheduling.cache.block_pool import BlockPool
from jaxllm.scheduling.cache.block_residency import BlockResidency
from tests.scheduling.simulation import Simulation, make_config, make_request


def test_a_stay_from_beginning_to_end() -> None:
    times = itertools.count()
    residency = BlockResidency(1.0, clock=lambda: float(next(times)))
    pool = BlockPool(2, residency)
    (block,) = pool.take(1)  # at 0
    for _ in range(6):  # at 1 to 6
        pool.share([block])
    for _ in range(7):
        pool.release([block])
    assert residency.take_evictions() == []
    pool.take(1)  # at 7; the new stay begins at 8
    assert residency.take_evictions() == [BlockEviction(lifetime=7.0, idle=1.0, reuse_gaps=[1.0] * 3)]
    pool.release([block])
    pool.take(1)
    assert residency.take_evictions() == [BlockEviction(lifetime=1.0, idle=1.0, reuse_gaps=[])]
    pool.release([block])
    assert pool.forget_all()
    pool.take(1)
    assert residency.take_evictions() == []


def test_only_a_part_is_followed() -> None:
    draws = itertools.cycle([0.05, 0.2, 0.9])
    pool = BlockPool(31, BlockResidency(0.1, draw=lambda: next(draws)))
    for _ in range(2):
        pool.release(pool.take(30))
    assert pool.residency is not None
    assert len(pool.residency.take_evictions()) == 10


def test_a_scheduler_that_evicts() -> None:
    simulation = Simulation(make_config(num_blocks=17, kv_cache_metrics_sample=1.0))
    for index in range(8):
        simulation.add(make_request(str(index), 30, max_tokens=2))
    simulation.run()
    residency = simulation.scheduler.cache.groups[0].pool.residency
    assert residency is not None
    evictions = residency.take_evictions()
    assert len(evictions) > 16
    assert all(0 <= each.idle <= each.lifetime for each in evictions)
    for changes in ({}, {"kv_cache_metrics_sample": 1.0, "enable_prefix_caching": False}):
        assert Simulation(make_config(num_blocks=17, **changes)).scheduler.cache.groups[0].pool.residency is None

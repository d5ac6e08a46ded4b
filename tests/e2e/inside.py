"""Functions that return the core, scheduler and state inside an `LLM`, for tests that look at them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from jaxllm import LLM
from jaxllm.beam_search import BeamSearchOutput
from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.core.engine_core import EngineCore
from jaxllm.scheduling.scheduler import Scheduler
from tests.engine.fake_core import BytesClient


def core_of(llm: LLM) -> EngineCore:
    """Return the core that runs in this process."""
    client = llm.llm_engine._core
    assert isinstance(client, (InprocClient, BytesClient))
    core = client._core
    assert isinstance(core, EngineCore)
    return core


def scheduler_of(llm: LLM) -> Scheduler:
    """Return the core's scheduler."""
    return core_of(llm)._scheduler


@contextmanager
def limited(scheduler: Scheduler, budget: int, num_blocks: int | None = None) -> Iterator[None]:
    """Give steps fewer tokens, and take blocks away; without, prefixes are not cached: that would make chunks fewer.

    Engines of other sizes would do the same with more programs to compile.
    """
    config, cache, taken = scheduler.config, scheduler.cache, array("i")
    scheduler.config = replace(config, max_num_batched_tokens=budget)
    if num_blocks is None:
        cache.enable_prefix_caching = False
    else:
        taken = cache.groups[0].pool.take(cache.groups[0].pool.num_available - num_blocks)
    try:
        yield
    finally:
        cache.groups[0].pool.release(taken)
        cache.enable_prefix_caching = True
        scheduler.config = config


def generated(output: BeamSearchOutput) -> list[list[int]]:
    """Return the tokens of each beam after the prompt."""
    return [each.tokens[len(each.orig_prompt["prompt_token_ids"]) :] for each in output.sequences]


def assert_nothing_left(scheduler: Scheduler) -> None:
    """Check that no request and no block is left."""
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.num_blocks_in_use, stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0, 0)
    assert not scheduler.cache.parked

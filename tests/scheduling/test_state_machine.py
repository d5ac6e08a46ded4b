"""Anything in any order: requests come, are planned, committed and aborted, the cache is reset; the laws hold always.

JAXLLM_LONG_TESTS=1 runs 200 times 5,000 steps instead of 20 times 500.
"""

from __future__ import annotations

import os
from collections import Counter

import hypothesis.internal.conjecture.engine
import hypothesis.stateful
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.scheduling.simulation import EOS, Simulation, make_config, make_request

IS_LONG = bool(os.environ.get("JAXLLM_LONG_TESTS"))
NUM_RUNS, NUM_STEPS = (200, 5_000) if IS_LONG else (20, 500)
MAX_MODEL_LEN = 24
STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5])
LENGTHS = st.sampled_from([1, 2, 5, 9, 13, 24])

EVENTS = 4 * ["add"] + 8 * ["plan"] + 8 * ["commit"] + 4 * ["step"] + ["abort", "reset cache"]


class SchedulerMachine(RuleBasedStateMachine):
    """The simulation under every sequence of calls that an engine may make."""

    seen: Counter[str]
    """What happened in all runs; set by the test."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_spare_blocks=st.sampled_from([0, 0, 1, 2, 5, 20]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        threshold=st.sampled_from([0, 0, 1, 5]),
        mode=st.sampled_from(["chunked", "chunked", "chunked", "whole", "uncached"]),
    )
    def start(
        self,
        policy: str,
        block_size: int,
        num_spare_blocks: int,
        max_num_seqs: int,
        budget: int,
        threshold: int,
        mode: str,
    ) -> None:
        is_whole = mode == "whole"
        config = make_config(
            policy=policy,
            block_size=block_size,
            num_blocks=1 - (-MAX_MODEL_LEN // block_size) + num_spare_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN if is_whole else budget,
            long_prefill_token_threshold=0 if is_whole else threshold,
            enable_chunked_prefill=not is_whole,
            enable_prefix_caching=mode != "uncached",
        )
        self.simulation = Simulation(config)
        self.num_added = 0
        self.seen["run"] += 1

    # One rule, not one per event: Hypothesis switches rules off for whole runs, and then most runs have no work to do.
    @rule(event=st.sampled_from(EVENTS), data=st.data())
    def happen(self, event: str, data: st.DataObject) -> None:
        match event:
            case "add" if len(self.simulation.live) < 12:
                self.add(data.draw(st.booleans()), data.draw(LENGTHS), data.draw(LENGTHS), data.draw(st.integers(0, 7)))
            case "plan" if len(self.simulation.in_flight) < 2:
                self.plan()
            case "commit" if self.simulation.in_flight:
                outputs = self.simulation.commit()
                self.seen["end"] += sum(output.finish_reason is not None for output in outputs)
            case "step":
                self.simulation.step(overlap=1)
            case "abort" if self.simulation.live:
                self.abort(data.draw(st.integers(0, 11)))
            case "reset cache":
                self.reset_cache()

    def add(self, is_id_reused: bool, num_shared: int, max_tokens: int, kind: int) -> None:
        self.num_added += 1
        prompt = STEMS[kind & 1][:num_shared] + [self.num_added % 50] * (kind & 3)
        max_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        ended = [request_id for request_id, seen in self.simulation.seen.items() if seen.finish_reason is not None]
        request = make_request(
            ended[-1] if is_id_reused and ended else str(self.num_added),
            prompt,
            max_tokens=max_tokens,
            priority=kind % 3,
            eos=EOS if kind & 1 else None,
            salt="salt" if kind == 5 else None,
            seed=kind,
            stop_token_ids=[3, 7, 11] if kind & 2 else [],
            min_tokens=min(kind & 4, max_tokens),
        )
        self.simulation.add(request)
        with pytest.raises(ValueError, match="is in use"):
            self.simulation.scheduler.add_request(request)

    def plan(self) -> None:
        num_in_flight = len(self.simulation.in_flight)
        plan = self.simulation.plan()
        if plan is not None:
            self.seen[f"plan with {num_in_flight} in flight"] += 1
            self.seen["preemption"] += plan.num_preempted
            self.seen["row continued on the device"] += sum(chunk.previous_row is not None for chunk in plan.chunks)

    def abort(self, position: int) -> None:
        live = self.simulation.live
        request_id = live[position % len(live)]
        self.seen[f"abort of a {self.simulation.scheduler.status_of(request_id).value} request"] += 1
        self.simulation.abort([request_id, "unknown", request_id])

    def reset_cache(self) -> None:
        is_idle = self.simulation.scheduler.stats().num_blocks_in_use == 0
        assert self.simulation.scheduler.reset_prefix_cache() == is_idle
        assert not is_idle or self.simulation.scheduler.cache.pool.num_cached == 0
        self.seen["cache reset" if is_idle else "cache reset refused"] += 1

    @invariant()
    def laws_hold(self) -> None:
        self.seen["step"] += 1
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run(overlap=1)
            self.seen["prefix hit"] += self.simulation.scheduler.stats().prefix_cache_hits


@pytest.mark.timeout(4 * 3600 if IS_LONG else 300)
def test_the_laws_hold_in_any_order_of_events(monkeypatch: pytest.MonkeyPatch):
    # Hypothesis ends a run when it has made too many choices; ours are long on purpose.
    for module in (hypothesis.internal.conjecture.engine, hypothesis.stateful):
        monkeypatch.setattr(module, "BUFFER_SIZE", 100 * NUM_STEPS)
    monkeypatch.setattr(SchedulerMachine, "seen", Counter(), raising=False)
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=NUM_RUNS,
            stateful_step_count=NUM_STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
        _min_steps=NUM_STEPS,
    )
    seen = SchedulerMachine.seen
    print(dict(seen))
    assert seen["step"] >= NUM_RUNS * NUM_STEPS
    never = {
        "preemption",
        "prefix hit",
        "end",
        "row continued on the device",
        "plan with 0 in flight",
        "plan with 1 in flight",
        "abort of a waiting request",
        "abort of a running request",
        "cache reset refused",
    } - (+seen).keys()
    assert not never

"""Requests come, are planned, committed and aborted, and the cache is reset, in any order; the laws hold always.

JAXLLM_LONG_TESTS=1 runs 200 times 5,000 steps instead of 20 times 500.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis.internal.conjecture.engine
import hypothesis.stateful
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jaxllm.core_messages import PromptMedia, RequestError
from jaxllm.exceptions import VLLMValidationError
from jaxllm.scheduling.cache.block_pool import NULL_BLOCK
from jaxllm.scheduling.config import GroupConfig, StepTarget
from jaxllm.scheduling.plan import StepPlan
from tests.scheduling.pictures import LARGE_PICTURES, PICTURES, Picture, exchanged, make_prompt, prefix
from tests.scheduling.simulation import EOS, Simulation, make_config, make_request, state_of

pytestmark = [pytest.mark.scheduling, pytest.mark.timeout(1200)]

WHY = RequestError("invalid", "why")
IS_LONG = bool(os.environ.get("JAXLLM_LONG_TESTS"))
NUM_RUNS, NUM_STEPS = (200, 5_000) if IS_LONG else (20, 500)
MAX_MODEL_LEN = 24
STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5])
KINDS = st.integers(0, 63)
TASKS = st.sampled_from([None, None, None, "embed", "token_embed"])
LENGTHS = st.sampled_from([1, 2, 5, 9, 13, 24])

EVENTS = 4 * ["add", "fork"] + 10 * ["plan"] + 10 * ["commit"] + 5 * ["step"]
EVENTS += ["abort"] + 2 * ["release", "end"] + ["reset cache"] + 3 * ["forget media"]
TEXTS = [[n] * n for n in range(1, 5)]
PARTS = st.lists(st.sampled_from([*PICTURES, *LARGE_PICTURES, *TEXTS]), min_size=1, max_size=5)
WANTED = {
    "preemption",
    "prefix hit",
    "end",
    "row continued on the device",
    "plan with 0 in flight",
    "plan with 1 in flight",
    "abort of a waiting request",
    "abort of a running request",
    "cache reset refused",
    "copy",
    "block behind a window",
    "block behind a chunk",
    "scored row",
    "counts filled",
    "commit wanted",
    "short prompt passed",
    "pool plan",
    "pool tokens plan",
    "request with pictures",
    "picture encoded",
    "cached picture",
    "media forgotten",
    "media kept",
    "block loaded",
    "block loaded from a file",
    "fetch given up",
    "fetch refused",
    "move that failed",
    "refusal of multi_modal_data",
    *(f"fork of a {state} request" for state in ("waiting", "running", "parked", "gone")),
    *(f"release of a {state} request" for state in ("waiting", "running", "parked", "gone")),
}
"""What happens in every test, sooner or later."""
MOST_REPEATS = 6
"""How often all runs are repeated until all of that has happened; most often once is enough."""


class SchedulerMachine(RuleBasedStateMachine):
    """The simulation under every sequence of calls that an engine may make."""

    seen: Counter[str]
    """Everything that happened in all runs; the test sets it."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_spare_blocks=st.sampled_from([0, 0, 1, 2, 5, 20]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        threshold=st.sampled_from([0, 0, 1, 5]),
        mode=st.sampled_from(["chunked", "chunked", "chunked", "whole", "uncached"]),
        num_spare_rows=st.sampled_from([0, 1, 3, 30]),
        tracks_all=st.booleans(),
        windows=st.lists(st.tuples(st.integers(1, 8) | st.integers(1, 30), st.sampled_from([1, 1, 2, 4])), max_size=2),
        chunk_blocks=st.lists(st.sampled_from([1, 1, 2, 3, 6]), max_size=2) | st.just([1]),
        pools_whole=st.booleans(),
        num_state_slots=st.sampled_from([0, 0, 3, 4, 7, 12]),
        num_host_blocks=st.sampled_from([0, 1, 5, 40]),
        num_media_rows=st.sampled_from([0, 7, 9, 20]),
        sees_both_sides=st.booleans(),
        has_rope=st.booleans(),
        step_seconds=st.sampled_from([None, 0.0, 0.005, 0.012]),
        short_prompts_pass=st.booleans(),
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
        num_spare_rows: int,
        tracks_all: bool,
        windows: list[tuple[int, int]],
        chunk_blocks: list[int],
        pools_whole: bool,
        num_state_slots: int,
        num_host_blocks: int,
        num_media_rows: int,
        sees_both_sides: bool,
        has_rope: bool,
        step_seconds: float | None,
        short_prompts_pass: bool,
    ) -> None:
        is_whole = mode == "whole"
        self.has_rope, chunk_blocks = has_rope, [] if sees_both_sides else chunk_blocks
        pools_whole = pools_whole and (is_whole or not chunk_blocks)
        budget = MAX_MODEL_LEN if is_whole or pools_whole else budget
        groups = [GroupConfig(num_blocks=1, window=window, tile_blocks=tile) for window, tile in windows]
        chunks = [num * block_size for num in chunk_blocks if not is_whole or num * block_size >= MAX_MODEL_LEN]
        groups += [GroupConfig(num_blocks=1, attention_chunk=chunk) for chunk in chunks]
        config = make_config(
            policy=policy,
            block_size=block_size,
            num_blocks=1 - (-MAX_MODEL_LEN // block_size) + num_spare_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            others=[
                replace(each, num_blocks=1 + each.most_blocks(MAX_MODEL_LEN, budget, block_size) + num_spare_blocks)
                for each in groups
            ],
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=0 if is_whole else threshold,
            enable_chunked_prefill=not is_whole,
            enable_prefix_caching=mode != "uncached",
            max_rows=max(2, max_num_seqs + num_spare_rows),
            tracks_all_tokens=tracks_all,
            whole_tasks=frozenset(["embed"] if pools_whole else []),
            num_state_slots=num_state_slots,
            num_host_blocks=(num_host_blocks,) * (1 + len(groups) + (num_state_slots > 0)) if num_host_blocks else (),
            root_hash=bytes(32) if num_host_blocks else None,
            num_media_rows=num_media_rows,
            sees_both_sides=sees_both_sides,
            step_target=None if step_seconds is None else StepTarget(step_seconds, 1.5),
            short_prompts_pass=short_prompts_pass,
        )
        self.simulation = Simulation(config)
        self.num_added = 0
        self.seen["run"] += 1

    # One rule, not one per event: Hypothesis switches rules off for whole runs, and then most runs have no work to do.
    @rule(event=st.sampled_from(EVENTS), data=st.data())
    def happen(self, event: str, data: st.DataObject) -> None:
        match event:
            case "add" if len(self.simulation.live) < 12:
                self.add(
                    data.draw(st.booleans()),
                    data.draw(LENGTHS),
                    data.draw(PARTS) if self.simulation.config.num_media_rows and data.draw(st.booleans()) else [],
                    data.draw(LENGTHS),
                    data.draw(KINDS),
                    data.draw(TASKS),
                )
            case "fork" if len(self.simulation.live) < 12 and self.simulation.seen:
                self.fork(
                    data.draw(st.integers(0, 3)), data.draw(LENGTHS), data.draw(st.integers(1, 6)), data.draw(KINDS)
                )
            case "plan" if len(self.simulation.in_flight) < 2:
                self.plan()
            case "commit" if self.simulation.in_flight:
                outputs = self.simulation.commit()
                self.seen["end"] += sum(output.finish_reason is not None for output in outputs)
            case "step":
                self.simulation.step(overlap=1)
            case "abort" if self.simulation.live:
                self.abort(data.draw(st.integers(0, 11)))
            case "end" if self.simulation.live:
                self.end(data.draw(st.integers(0, 11)), data.draw(st.booleans()))
            case "release" if self.simulation.seen:
                self.release(data.draw(st.integers(0, 5)))
            case "reset cache":
                self.reset_cache()
            case "forget media":
                media = self.simulation.scheduler.media
                is_idle = not any(media._held.values())
                assert media.forget_all() == is_idle
                assert not is_idle or len(media._free) == media.num_rows
                self.seen["media forgotten" if is_idle else "media kept"] += 1

    def add(
        self,
        is_id_reused: bool,
        num_shared: int,
        parts: list[list[int] | Picture],
        max_tokens: int,
        kind: int,
        task: str | None,
    ) -> None:
        prompt, media = STEMS[kind & 1][:num_shared] + [self.num_added % 50] * (kind & 3), None
        if parts:
            prompt, media = make_prompt([prompt[: num_shared % 6], *parts], has_rope=self.has_rope)
            media, num_tokens = prefix(media, MAX_MODEL_LEN)
            prompt = prompt[:num_tokens]
        ended = [request_id for request_id, seen in self.simulation.seen.items() if seen.finish_reason is not None]
        request_id = ended[-1] if is_id_reused and ended else str(self.num_added)
        self.send(request_id, prompt, max_tokens, kind, None, task, media)

    def fork(self, age: int, num_shared: int, num_forks: int, kind: int) -> None:
        """Add forks of a recent request: of its prompt, or of some of its tokens and one of their own."""
        parked = list(self.simulation.scheduler.cache.parked)
        donor_ids = parked if parked and kind & 6 else list(self.simulation.seen)
        donor_id = donor_ids[-1 - age % len(donor_ids)]
        donor = self.simulation.truths[donor_id]
        num_forks = min(num_forks, 12 - len(self.simulation.live))
        self.seen[f"fork of a {self.state_of(donor_id)} request"] += num_forks
        for i in range(num_forks):
            prompt, media = donor.request.prompt_token_ids, donor.request.media
            if kind & 1:
                media, length = prefix(media, min(num_shared, len(donor.token_ids), MAX_MODEL_LEN - 1))
                prompt = [*donor.token_ids[:length], (num_shared + i) % 50]
            media = exchanged(media) if kind & 32 else media
            max_tokens = 2 if kind & 1 else 7
            self.send(f"{donor_id[:9]}/{self.num_added}", prompt, max_tokens, kind | i << 6, donor_id, None, media)

    def state_of(self, request_id: str) -> str:
        if request_id in self.simulation.live:
            return state_of(self.simulation.scheduler, request_id)
        return "parked" if request_id in self.simulation.scheduler.cache.parked else "gone"

    def send(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        kind: int,
        fork_of: str | None,
        task: str | None = None,
        media: PromptMedia | None = None,
    ) -> None:
        self.num_added += 1
        max_tokens = max(1, min(max_tokens, MAX_MODEL_LEN - len(prompt)))
        scoring: dict[str, Any] = {}
        if kind & 24 == 8 and task is None:
            rows = [[1]] * (len(prompt) - 4)
            scores_late = not kind & 1 and rows
            late = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": 3}
            scoring = late if scores_late else {"prompt_logprobs": 1}
        request = make_request(
            request_id,
            prompt,
            max_tokens=max_tokens,
            priority=kind % 3,
            eos=EOS if kind & 1 else None,
            salt="salt" if kind & 7 == 5 and fork_of is None else None,
            seed=kind,
            stop_token_ids=[3, 7, 11] if kind & 2 else [],
            min_tokens=min(kind & 4, max_tokens),
            fork_of=fork_of,
            keeps_blocks=bool(kind & 16),
            num_seats=1 + (kind & 3) if kind & 16 and fork_of is None else 1,
            task=task,
            media=media,
            presence_penalty=float(kind & 7 == 3 and task is None),
            thinking_token_budget=9 if kind & 40 == 32 and task is None else None,
            **scoring,
        )
        try:
            self.simulation.add(request)
        except VLLMValidationError as error:
            assert media is not None
            self.seen[f"refusal of {error.parameter}"] += 1
            return
        self.seen["request with pictures"] += media is not None and bool(media.items)
        with pytest.raises(ValueError, match="is in use"):
            self.simulation.scheduler.add_request(request)

    def plan(self) -> None:
        num_in_flight = len(self.simulation.in_flight)
        plan = self.simulation.plan()
        if plan is not None:
            self.seen[f"plan with {num_in_flight} in flight"] += 1
            self.seen["preemption"] += plan.num_preempted
            self.seen[f"{plan.kind.value} plan"] += 1
            self.seen["row continued on the device"] += sum(chunk.previous_row is not None for chunk in plan.chunks)

            self.seen["copy"] += sum(map(len, plan.copies))
            for group, config in enumerate(self.simulation.config.groups):
                num_behind = sum(chunk.block_ids[group].count(NULL_BLOCK) for chunk in plan.chunks)
                self.seen["block behind a window"] += num_behind * (config.window is not None)
                self.seen["block behind a chunk"] += num_behind * (config.attention_chunk is not None)
            self.seen["table taken over"] += self.num_taken_over(plan)
            self.seen["scored row"] += plan.num_rows - len(plan.chunks)
            self.seen["counts filled"] += sum(chunk.history is not None for chunk in plan.chunks)
            self.seen["picture encoded"] += len(plan.encodes)
            self.seen["short prompt passed"] += self.simulation.has_passed
            self.seen["commit wanted"] += self.simulation.scheduler.waits_for_commit()

    def num_taken_over(self, plan: StepPlan) -> int:
        """Count the forks that go on in a block that is not full without having copied it."""
        size, targets = self.simulation.config.block_size, {target for _, target in plan.copies[0]}
        first = [chunk for chunk in plan.chunks if self.simulation.num_chunks[chunk.request_id] == 1]
        return sum(c.start % size > 0 and c.block_ids[0][c.start // size] not in targets for c in first)

    def end(self, position: int, is_error: bool) -> None:
        live = self.simulation.live
        self.simulation.end(live[position % len(live)], *(("error", WHY) if is_error else ("stop", None)))

    def release(self, age: int) -> None:
        simulation = self.simulation
        parked = list(simulation.scheduler.cache.parked)
        request_ids = parked if parked and age & 1 else list(simulation.seen)
        request_id = request_ids[-1 - age % len(request_ids)]
        self.seen[f"release of a {self.state_of(request_id)} request"] += 1
        simulation.scheduler.release([request_id, "unknown", request_id])

    def abort(self, position: int) -> None:
        live = self.simulation.live
        request_id = live[position % len(live)]
        self.seen[f"abort of a {state_of(self.simulation.scheduler, request_id)} request"] += 1
        self.simulation.abort([request_id, "unknown", request_id])

    def reset_cache(self) -> None:
        is_idle = self.simulation.scheduler.stats().num_running_reqs == 0
        assert self.simulation.scheduler.reset_prefix_cache() == is_idle
        assert not is_idle or not any(group.pool.num_cached for group in self.simulation.scheduler.cache.groups)
        self.seen["cache reset" if is_idle else "cache reset refused"] += 1

    @invariant()
    def laws_hold(self) -> None:
        self.seen["step"] += 1
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run(overlap=1)
            self.simulation.scheduler.release(list(self.simulation.seen))
            assert self.simulation.scheduler.stats().num_blocks_in_use == 0
            self.seen["block loaded"] += self.simulation.host.num_loads
            self.seen["block loaded from a file"] += self.simulation.host.num_from_files
            self.seen["fetch given up"] += self.simulation.host.num_given_up
            self.seen["fetch refused"] += self.simulation.scheduler.fetch_times.num_refused
            self.seen["move that failed"] += self.simulation.host.num_failures
            self.seen["cached picture"] += self.simulation.num_holds - self.simulation.num_encodes
            self.seen["prefix hit"] += self.simulation.scheduler.stats().prefix_cache_hits


@pytest.mark.timeout(4 * 3600 if IS_LONG else 300)
def test_the_laws_hold_in_any_order_of_events(monkeypatch: pytest.MonkeyPatch):
    # Hypothesis ends a run when it has made too many choices; ours are long on purpose.
    for module in (hypothesis.internal.conjecture.engine, hypothesis.stateful):
        monkeypatch.setattr(module, "BUFFER_SIZE", 100 * NUM_STEPS)
    monkeypatch.setattr(SchedulerMachine, "seen", Counter(), raising=False)
    repeat, never = 0, WANTED
    while never and repeat < MOST_REPEATS:
        repeat += 1
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
        assert seen["step"] >= repeat * NUM_RUNS * NUM_STEPS
        never = WANTED - (+seen).keys()
    assert not never

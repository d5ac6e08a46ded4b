"""A plan decides order, chunks, rows continued on the device, cache hits and preemption."""

from __future__ import annotations

import pytest

from jaxllm.scheduling.config import GroupConfig
from jaxllm.scheduling.plan import StepPlan
from jaxllm.scheduling.step_builder import InFlight, tally
from tests.scheduling.simulation import Simulation, make_config, make_request, state_of


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """List (request, start, tokens) of each row."""
    return [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] if plan else []


def test_nothing_to_do():
    simulation = Simulation(make_config())
    assert simulation.scheduler.plan() is None
    assert not simulation.scheduler.has_unfinished_requests()
    assert simulation.scheduler.stats().num_steps == 0


def test_a_prompt_then_one_token_a_step():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 6, max_tokens=3))
    shapes = []
    while simulation.scheduler.has_unfinished_requests():
        shapes.append(shape(simulation.plan()))
        simulation.commit()
    assert shapes == [[("a", 0, 6)], [("a", 6, 1)], [("a", 7, 1)]]


def test_a_long_prompt_is_cut_to_the_budget_and_samples_at_its_end_only():
    simulation = Simulation(make_config(max_num_batched_tokens=16))
    simulation.add(make_request("a", 40))
    samples = []
    for expected in ([("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)]):
        plan = simulation.plan()
        assert plan is not None
        assert shape(plan) == expected
        samples.append(plan.chunks[0].samples)
        simulation.commit()
    assert samples == [False, False, True]


def test_one_request_gets_at_most_the_threshold():
    simulation = Simulation(make_config(max_num_batched_tokens=16, long_prefill_token_threshold=6))
    for name in "abc":
        simulation.add(make_request(name, 20))
    assert shape(simulation.plan()) == [("a", 0, 6), ("b", 0, 6), ("c", 0, 4)]


def test_no_step_is_of_two_chunks():
    chunks = [GroupConfig(num_blocks=33, attention_chunk=size) for size in (12, 20)]
    simulation = Simulation(make_config(max_num_batched_tokens=16, others=chunks))
    simulation.add(make_request("a", 26, max_tokens=16))
    shapes = []
    while simulation.scheduler.has_unfinished_requests():
        shapes += shape(simulation.plan())
        simulation.commit()
    assert shapes[:4] == [("a", 0, 12), ("a", 12, 8), ("a", 20, 4), ("a", 24, 2)]
    assert shapes[4:] == [("a", position, 1) for position in range(26, 41)]


def test_a_step_gives_another_request_what_a_chunk_leaves():
    simulation = Simulation(
        make_config(max_num_batched_tokens=32, others=[GroupConfig(num_blocks=33, attention_chunk=12)])
    )
    simulation.add(make_request("a", 20))
    simulation.add(make_request("b", 30))
    assert shape(simulation.plan()) == [("a", 0, 12), ("b", 0, 12)]
    simulation.commit()
    assert shape(simulation.plan()) == [("a", 12, 8), ("b", 12, 12)]


@pytest.mark.parametrize(("num_known", "num_wanted"), [(24, 0), (28, 1), (32, 2), (35, 2), (36, 0)])
def test_a_hit_needs_the_blocks_of_its_last_chunk(num_known: int, num_wanted: int):
    simulation = Simulation(make_config(others=[GroupConfig(num_blocks=33, attention_chunk=12)]))
    prompt = list(range(40))
    simulation.add(make_request("a", prompt[:num_known], max_tokens=1))
    simulation.run()
    simulation.add(make_request("b", prompt))
    plan = simulation.plan()
    assert plan is not None
    num_cached = num_known // 4 * 4
    assert plan.chunks[0].start == num_cached
    _, block_ids = plan.chunks[0].block_ids
    first = num_cached // 4 - num_wanted
    assert not any(block_ids[:first])
    assert all(block_ids[first:])
    assert simulation.scheduler.cache.groups[1].pool.num_in_use == len(block_ids) - first


def test_blocks_of_a_chunk_come_back_with_the_next_one():
    simulation = Simulation(make_config(others=[GroupConfig(num_blocks=4, attention_chunk=12)]))
    simulation.add(make_request("a", 20, max_tokens=40))
    num_in_use = []
    while simulation.scheduler.has_unfinished_requests():
        simulation.plan()
        num_in_use.append(simulation.scheduler.cache.groups[1].pool.num_in_use)
        simulation.commit()
    # 12 tokens, then 8, then one at a time: the ends of the steps are those of 1 to 3 blocks.
    ends = [12, 20, *range(21, 60)]
    assert num_in_use == [(end - 1) % 12 // 4 + 1 for end in ends]


def test_a_long_prompt_leaves_a_token_to_those_behind_it():
    simulation = Simulation(make_config(policy="priority", max_num_batched_tokens=16))
    simulation.add(make_request("short", 1, priority=1, max_tokens=20))
    simulation.step()
    simulation.add(make_request("long", 60, priority=0))
    for start in (0, 15, 30, 45):
        assert shape(simulation.plan()) == [("short", start // 15 + 1, 1), ("long", start, 15)]
        simulation.commit()
    simulation.run()


def test_decode_rows_come_first_each_kind_in_order():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 5))
    simulation.add(make_request("b", 5))
    simulation.step()
    simulation.add(make_request("c", 5))
    simulation.add(make_request("d", 1))
    simulation.add(make_request("e", 2))
    plan = simulation.plan()
    assert plan is not None
    assert [chunk.request_id for chunk in plan.chunks] == ["a", "b", "d", "c", "e"]
    assert ([len(chunk.token_ids) for chunk in plan.chunks].count(1), plan.num_tokens) == (3, 10)


def test_sequence_slots_limit_admission():
    simulation = Simulation(make_config(max_num_seqs=2))
    for name in "abc":
        simulation.add(make_request(name, 3))
    assert len(shape(simulation.plan())) == 2
    stats = simulation.scheduler.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)
    simulation.run()


def test_whole_prompts_wait_for_a_step_that_takes_them_whole():
    simulation = Simulation(make_config(max_num_batched_tokens=64, enable_chunked_prefill=False))
    simulation.add(make_request("a", 40))
    simulation.add(make_request("b", 30))
    simulation.add(make_request("c", 2))
    assert shape(simulation.plan()) == [("a", 0, 40)]
    simulation.commit()
    assert shape(simulation.plan()) == [("a", 40, 1), ("b", 0, 30), ("c", 0, 2)]


def test_priority_goes_before_arrival():
    simulation = Simulation(make_config(policy="priority", max_num_seqs=1))
    simulation.add(make_request("late", 3, priority=1, arrival_time=0.0))
    simulation.add(make_request("second", 3, priority=0, arrival_time=2.0))
    simulation.add(make_request("first", 3, priority=0, arrival_time=1.0))
    order = []
    while simulation.scheduler.has_unfinished_requests():
        order += [request_id for request_id, _, _ in shape(simulation.plan())]
        simulation.commit()
    assert list(dict.fromkeys(order)) == ["first", "second", "late"]


# -- steps in flight ---------------------------------------------------------------------------------------------------


def test_a_row_continues_the_row_in_flight():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 9))
    simulation.add(make_request("b", 1))
    assert shape(simulation.plan()) == [("b", 0, 1), ("a", 0, 9)]
    plan = simulation.plan()
    assert plan is not None
    assert shape(plan) == [("b", 1, 1), ("a", 9, 1)]
    assert [chunk.previous_row for chunk in plan.chunks] == [0, 1]
    assert [list(chunk.token_ids) for chunk in plan.chunks] == [[0], [0]]
    assert [chunk.num_output_tokens for chunk in plan.chunks] == [1, 1]


def test_a_prompt_is_planned_ahead_of_its_chunk_in_flight():
    simulation = Simulation(make_config(max_num_batched_tokens=4))
    simulation.add(make_request("a", 10))
    plans = [simulation.plan() for _ in range(2)]
    assert [shape(plan) for plan in plans] == [[("a", 0, 4)], [("a", 4, 4)]]
    simulation.commit()
    plan = simulation.plan()
    assert plan is not None
    assert (shape(plan), plan.chunks[0].previous_row, plan.chunks[0].samples) == ([("a", 8, 2)], None, True)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(5, 1), (62, 2)], ids=["max_tokens", "max_model_len"])
def test_a_request_that_ends_with_the_token_in_flight_gets_no_further_row(prompt: int, max_tokens: int):
    simulation = Simulation(make_config())
    simulation.add(make_request("a", prompt, max_tokens=max_tokens))
    for _ in range(max_tokens - 1):
        simulation.step()
    assert simulation.plan() is not None
    assert simulation.plan() is None
    assert simulation.commit()[0].finish_reason == "length"


def test_only_rows_of_the_latest_step_in_flight_can_be_continued():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 3))
    simulation.add(make_request("b", 1))
    older, latest = simulation.plan(), simulation.plan()
    assert older is not None
    assert latest is not None
    _, (b, a) = simulation.scheduler._in_flight[older.step_id]
    without_b = StepPlan(latest.step_id, latest.chunks[1:], 0)
    assert latest.chunks[0].request_id == "b"
    assert tally([(older, [b, a]), (without_b, [a])]) == {b: InFlight(1, 1, None), a: InFlight(4, 2, 0)}


def test_a_plan_does_not_change_when_its_requests_do():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 4))
    first = simulation.plan()
    assert first is not None
    block_ids = list(first.chunks[0].block_ids[0])
    second = simulation.plan()
    assert second is not None
    assert list(first.chunks[0].block_ids[0]) == block_ids == list(second.chunks[0].block_ids[0])[:1]
    token_ids = list(first.chunks[0].token_ids)
    simulation.commit()
    simulation.abort(["a"])
    assert list(first.chunks[0].token_ids) == token_ids
    assert len(second.chunks[0].block_ids[0]) == 2


# -- prefix cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(12, 8), (13, 12), (11, 8), (4, 0), (5, 4), (1, 0)])
def test_a_hit_is_whole_blocks_and_leaves_the_last_token(num_tokens: int, num_cached: int):
    simulation = Simulation(make_config())
    prompt = list(range(1, 21))
    simulation.add(make_request("a", prompt, max_tokens=1))
    simulation.run()
    simulation.add(make_request("b", prompt[:num_tokens], max_tokens=1))
    assert shape(simulation.plan()) == [("b", num_cached, num_tokens - num_cached)]
    (output,) = simulation.commit()
    assert output.num_cached_tokens == num_cached
    stats = simulation.scheduler.stats()
    counts = stats.prefix_cache_requests, stats.prefix_cache_queries, stats.prefix_cache_hits
    assert counts == (2, 20 + num_tokens, num_cached)


def test_generated_tokens_are_found_too():
    simulation = Simulation(make_config())
    simulation.add(make_request("a", 3, max_tokens=10))
    simulation.run(overlap=1)
    truth = simulation.truths["a"]
    simulation.add(make_request("b", truth.request.prompt_token_ids + truth.outputs + [1]))
    assert shape(simulation.plan()) == [("b", 12, 2)]


def test_a_block_is_found_while_the_step_that_fills_it_is_in_flight():
    simulation = Simulation(make_config())
    prompt = list(range(1, 11))
    simulation.add(make_request("a", prompt))
    simulation.plan()
    simulation.add(make_request("b", prompt))
    assert ("b", 8, 2) in shape(simulation.plan())
    simulation.run(overlap=1)


def test_requests_of_one_step_do_not_share():
    simulation = Simulation(make_config())
    prompt = list(range(1, 11))
    simulation.add(make_request("a", prompt))
    simulation.add(make_request("b", prompt))
    assert shape(simulation.plan()) == [("a", 0, 10), ("b", 0, 10)]
    simulation.run()


@pytest.mark.parametrize(
    ("salts", "num_cached"), [(("x", "x"), 8), (("x", "y"), 0), ((None, "x"), 0), (("x", None), 0)]
)
def test_a_salt_keeps_caches_apart(salts: tuple[str | None, str | None], num_cached: int):
    simulation = Simulation(make_config())
    prompt = list(range(1, 11))
    for name, salt in zip("ab", salts, strict=True):
        simulation.add(make_request(name, prompt, salt=salt, max_tokens=1))
        assert shape(simulation.plan())[0][1] == (0 if name == "a" else num_cached)
        simulation.commit()


def test_the_cache_can_be_off():
    simulation = Simulation(make_config(enable_prefix_caching=False))
    for name in "ab":
        simulation.add(make_request(name, list(range(1, 11)), max_tokens=1))
        simulation.run()
    stats = simulation.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0), "nothing is looked up"
    assert simulation.scheduler.cache.groups[0].pool.num_cached == 0


def test_reset_prefix_cache_refuses_while_blocks_are_in_use():
    simulation = Simulation(make_config())
    prompt = list(range(1, 11))
    simulation.add(make_request("a", prompt, max_tokens=2))
    simulation.step()
    assert not simulation.scheduler.reset_prefix_cache()
    assert simulation.scheduler.reset_prefix_cache(preempt=True)
    assert state_of(simulation.scheduler, "a") == "preempted"
    simulation.scheduler.check()
    simulation.run()
    assert simulation.scheduler.reset_prefix_cache()
    simulation.add(make_request("b", prompt))
    assert shape(simulation.plan()) == [("b", 0, 10)]


# -- preemption --------------------------------------------------------------------------------------------------------


def crowd(policy: str = "fcfs") -> Simulation:
    """Add three requests of 16 tokens that fill a pool of 16 blocks to within 4 of them, none in flight."""
    simulation = Simulation(make_config(num_blocks=17, policy=policy))
    for name, priority in zip("abc", (1, 2, 0), strict=True):
        simulation.add(make_request(name, 15, max_tokens=40, priority=priority))
    simulation.step()
    return simulation


def run_until_preemption(simulation: Simulation, overlap: int) -> StepPlan:
    for _ in range(100):
        plan = simulation.plan()
        if plan is not None and plan.num_preempted:
            return plan
        while len(simulation.in_flight) > (overlap if plan else 0):
            simulation.commit()
    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "c"), ("priority", "b")])
def test_the_last_in_order_is_preempted(policy: str, victim: str, overlap: int):
    simulation = crowd(policy)
    plan = run_until_preemption(simulation, overlap)
    assert state_of(simulation.scheduler, victim) == "preempted"
    assert victim not in [chunk.request_id for chunk in plan.chunks]
    assert simulation.scheduler.stats().num_preemptions == plan.num_preempted == 1
    simulation.run(overlap)


def test_a_step_that_preempts_admits_nobody():
    simulation = Simulation(make_config(num_blocks=17, max_num_seqs=3, policy="priority"))
    for name in "abc":
        simulation.add(make_request(name, 15, max_tokens=40, priority=1))
    simulation.step()
    simulation.add(make_request("first", 1, max_tokens=2, priority=0))
    plan = run_until_preemption(simulation, 0)
    assert [chunk.request_id for chunk in plan.chunks] == ["a", "b"]
    simulation.commit()
    assert [request_id for request_id, _, _ in shape(simulation.plan())] == ["a", "b", "first"]


def test_a_preempted_request_recomputes_what_the_cache_lost_and_keeps_its_tokens():
    simulation = crowd()
    run_until_preemption(simulation, 0)
    simulation.commit()
    num_seen = len(simulation.seen["c"].token_ids)
    assert num_seen > 1
    simulation.abort(["b"])
    plan = simulation.plan()
    assert plan is not None
    chunk = next(chunk for chunk in plan.chunks if chunk.request_id == "c")
    assert chunk.start == 16, "its full blocks are still there; the last one was not full"
    assert chunk.start + len(chunk.token_ids) == 15 + num_seen
    assert (chunk.samples, chunk.num_output_tokens) == (True, num_seen)
    assert {output.request_id: output.num_preemptions for output in simulation.commit()} == {"a": 0, "c": 1}
    simulation.run()


def test_a_request_with_rows_in_flight_keeps_its_blocks():
    simulation = crowd()
    for _ in range(100):
        in_flight = {chunk.request_id for plan, _ in simulation.in_flight for chunk in plan.chunks}
        plan = simulation.plan()
        running = {request.request_id for request in simulation.scheduler._running}
        assert in_flight & set(simulation.live) <= running
        while len(simulation.in_flight) > (1 if plan else 0):
            simulation.commit()
    assert simulation.scheduler.stats().num_preemptions > 0


def test_a_prompt_is_admitted_only_when_all_of_it_fits():
    simulation = Simulation(make_config(num_blocks=17, long_prefill_token_threshold=8))
    simulation.add(make_request("a", 48, max_tokens=3))
    while not simulation.seen["a"].token_ids:
        simulation.step()
    simulation.add(make_request("b", 60, max_tokens=2))
    simulation.add(make_request("c", 1, max_tokens=2))
    assert shape(simulation.plan()) == [("a", 48, 1)], "the first chunk of b would fit, b would not; c waits behind it"
    simulation.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_held_requests_sit_out(policy: str):
    simulation = Simulation(make_config(policy=policy))
    for name in ("a", "b"):
        simulation.add(make_request(name, 4))
    assert shape(simulation.plan()) == [("a", 0, 4), ("b", 0, 4)]
    simulation.commit()
    simulation.add(make_request("c", 3))
    simulation.add(make_request("d", 2))
    scheduler = simulation.scheduler
    plan = scheduler.plan(late={"a", "c", "unknown"})
    assert shape(plan) == [("b", 4, 1), ("d", 0, 2)]
    assert state_of(scheduler, "c") == "waiting"

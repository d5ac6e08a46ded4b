"""Prompts beside streams: streams' tokens keep coming, short prompts pass long ones, and every prompt comes to its end.

The device is a function of a step's tokens and a clock.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import quantiles

import msgspec
import pytest

from jaxllm.core_messages import EngineCoreRequest
from jaxllm.scheduling.config import SchedulerConfig, StepTarget
from jaxllm.scheduling.plan import StepKind, StepPlan, StepResult
from jaxllm.scheduling.prompts.shares import PromptShares
from jaxllm.scheduling.prompts.step_times import StepTimes
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.scheduler import Scheduler
from tests.scheduling.pictures import PICTURES, make_prompt
from tests.scheduling.simulation import Simulation, all_outputs, make_config, make_request
from tests.scheduling.test_simulation import SIGHTS, with_pictures, workload

type Device = Callable[[int], float]

FAIR = StepTarget(0.15, 1.75, 2.0)


def cpu(num_tokens: int) -> float:
    """Return the seconds of a step on a device that computes just the tokens."""
    return 0.012 + 0.0024 * num_tokens


def accelerator(num_tokens: int) -> float:
    """Return the seconds of a step that is padded to a power of two, and waits for the weights up to 512 tokens."""
    return 0.01 * max(1.0, 2 ** math.ceil(math.log2(num_tokens)) / 512)


def config(**changes: object) -> SchedulerConfig:
    roomy = {"num_blocks": 2000, "block_size": 128, "max_num_seqs": 64, "max_model_len": 8192}
    return make_config(**{**roomy, "max_num_batched_tokens": 512, **changes})


def streams(count: int, num_tokens: int, prompt: int = 16) -> list[tuple[float, EngineCoreRequest]]:
    return [(0.0, make_request(f"stream {i}", prompt, max_tokens=num_tokens)) for i in range(count)]


class Run:
    """What came when, of requests with their times of arrival, on a scheduler and a device."""

    def __init__(
        self, settings: SchedulerConfig, device: Device, arrivals: Iterable[tuple[float, EngineCoreRequest]]
    ) -> None:
        self.plans: list[StepPlan] = []
        self.arrived: dict[str, float] = {}
        self.times: dict[str, list[float]] = defaultdict(list)
        self.now = 0.0
        scheduler, pending = Scheduler(settings), sorted(arrivals, key=lambda arrival: arrival[0])
        while pending or scheduler.has_unfinished_requests():
            while pending and (pending[0][0] <= self.now or not scheduler.has_unfinished_requests()):
                moment, request = pending.pop(0)
                self.now = max(self.now, moment)
                self.arrived[request.request_id] = moment
                scheduler.add_request(request)
            plan = scheduler.plan()
            assert plan is not None
            self.plans.append(plan)
            seconds = device(plan.num_tokens)
            self.now += seconds
            tokens = [5 for _ in plan.chunks]
            result = StepResult(tokens, [None] * len(tokens), [[]] * len(tokens), (), seconds)
            for output in all_outputs(*scheduler.commit(plan, result)):
                self.times[output.request_id].append(self.now)

    def gaps(self) -> float:
        """Return the 99th percentile of the seconds between two tokens of the streams."""
        times = [times for name, times in self.times.items() if name.startswith("stream")]
        return quantiles([after - before for each in times for before, after in pairwise(each)], n=100)[98]

    def first(self, name: str) -> float:
        """Return the seconds until a request's first token."""
        return self.times[name][0] - self.arrived[name]


def test_streams_beside_a_long_prompt_wait_at_most_twice_as_long():
    long = make_request("long", 8000, max_tokens=2)
    settings = config(step_target=FAIR)
    alone = Run(settings, cpu, streams(32, 400))
    beside = Run(settings, cpu, [*streams(32, 400), (8.0, long)])
    assert beside.gaps() <= 1.8 * alone.gaps()
    assert beside.first("long") <= 3 * 8000 * 0.0024
    without = Run(config(), cpu, [*streams(32, 400), (8.0, long)])
    assert without.gaps() > 5 * alone.gaps()


def test_a_slow_moment_before_a_long_prompt_does_not_last():
    num_steps = itertools.count()

    def hiccuping(num_tokens: int) -> float:
        return cpu(num_tokens) * (2.0 if 60 <= next(num_steps) < 80 else 1.0)

    settings = config(step_target=FAIR)
    run = Run(settings, hiccuping, [*streams(32, 400), (8.0, make_request("long", 8000, max_tokens=2))])
    plain = cpu(32)
    of_long = [
        (len(plan.chunks), plan.num_tokens)
        for plan in run.plans[80:]
        if plan.num_tokens > len(plan.chunks) == len(run.plans[79].chunks)
    ]
    assert len(of_long) > 100
    late = [num_tokens for _, num_tokens in of_long[64:]]
    assert max(map(cpu, late)) <= 1.8 * plain


@pytest.mark.parametrize("milliseconds", [12, 21, 45])
def test_on_an_accelerator_chunks_fill_the_buckets_that_keep_the_target(milliseconds: int):
    settings = config(step_target=StepTarget(milliseconds / 1e3), max_num_batched_tokens=8192)
    long = make_request("long", 8000, max_tokens=2)
    run = Run(settings, accelerator, [*streams(32, 300), (0.5, long)])
    assert run.gaps() <= milliseconds / 1e3
    most = 512 * 2 ** int(math.log2(milliseconds / 10))
    sizes = [plan.num_tokens for plan in run.plans if any(chunk.request_id == "long" for chunk in plan.chunks)]
    assert sizes.count(most) >= len(sizes) / 3


def test_many_short_prompts_at_once_hold_nobody_up_and_cost_little():
    arrivals = streams(16, 64, prompt=128)
    fair, greedy = (Run(config(step_target=target), cpu, arrivals) for target in (FAIR, None))
    assert greedy.gaps() > 1.0
    assert fair.gaps() <= 0.16
    assert fair.now <= greedy.now / 0.95


def test_few_streams_do_not_hold_up_many_prompts():
    arrivals = streams(64, 64, prompt=128)
    targets = {"fair": FAIR, "strict": StepTarget(0.15, 1.75), "greedy": None}
    runs = {name: Run(config(step_target=target), cpu, arrivals) for name, target in targets.items()}
    firsts = {name: statistics.median(map(run.first, run.times)) for name, run in runs.items()}
    assert firsts["fair"] <= 1.1 * firsts["greedy"]
    assert firsts["strict"] >= 1.3 * firsts["greedy"]
    assert runs["fair"].gaps() <= 0.5 * runs["greedy"].gaps()


def test_a_target_that_decodes_alone_miss_leaves_prompts_a_few_tokens():
    run = Run(config(step_target=StepTarget(0.001)), cpu, [*streams(8, 300), (1.0, make_request("late", 800))])
    chunks = [len(chunk.token_ids) for plan in run.plans for chunk in plan.chunks if chunk.request_id == "late"]
    assert chunks[:100] == [4] * 100


def test_a_short_prompt_passes_a_long_one_that_keeps_a_quarter():
    arrivals = [(0.0, make_request("long", 8000)), (1.0, make_request("short", 30)), (1.0, make_request("other", 600))]
    passing, in_order = (Run(config(short_prompts_pass=on), cpu, arrivals) for on in (True, False))
    assert passing.first("short") < 2 * cpu(512) < 18 < in_order.first("short")
    assert passing.first("other") < 4 * cpu(512)
    assert passing.first("long") <= in_order.first("long") + cpu(700)
    for plan in passing.plans[:-8]:
        sizes = {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}
        assert 4 * sizes["long"] >= plan.num_tokens - 3


@pytest.mark.parametrize("spacing", [0.2, 0.45])
def test_short_prompts_without_end_delay_a_long_one_by_a_known_time(spacing: float):
    shorts = [(spacing * i, make_request(f"short {i}", 120, max_tokens=1)) for i in range(300)]
    arrivals = [*shorts, (1.0, make_request("long", 4000)), (1.01, make_request("next", 4000))]
    run = Run(config(short_prompts_pass=True), cpu, arrivals)
    alone = math.ceil(4000 / 512) * cpu(512)
    assert run.first("long") <= 4.3 * alone
    assert run.first("next") <= 8.6 * alone
    if 120 / spacing < 300:  # more than the rest of what the device computes
        assert max(run.first(f"short {i}") for i in range(300)) < 4 * cpu(512)


def test_priorities_are_not_passed():
    arrivals = [
        (0.0, make_request("late", 100, priority=2)),
        (0.0, make_request("first", 4000, priority=-1)),
        (0.0, make_request("second", 20, priority=1)),
    ]
    run = Run(config(short_prompts_pass=True, policy="priority"), cpu, arrivals)
    assert [chunk.request_id for chunk in run.plans[0].chunks] == ["first"]
    assert run.first("first") <= run.first("second") <= run.first("late")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ([100, 10, 20], [70, 10, 20]),
        ([100, 60, 50], [25, 25, 50]),
        ([10, 100, 95], [10, 0, 90]),
        ([400, 400], [100, 0]),
        ([400, 300], [25, 75]),
    ],
)
def test_the_first_in_line_has_a_quarter_and_the_shortest_the_rest(missing: Sequence[int], expected: Sequence[int]):
    requests = [Request(make_request(str(i), 1), (i,), queued_ts=0.0) for i in range(len(missing))]
    shares = PromptShares(config(), StepTimes()).share_out(100, zip(missing, requests, strict=True))
    assert [shares[request] for request in requests] == expected


def test_cached_beginnings_take_nothing_of_a_step():
    stem = [7] * 2000
    warm = (0.0, make_request("warm", [*stem, 1], max_tokens=1))
    arrivals = [(9.0, make_request(f"hit {i}", [*stem, *[10 + i] * 10], max_tokens=2)) for i in range(16)]
    run = Run(config(block_size=16, num_blocks=4000, short_prompts_pass=True), cpu, [warm, *arrivals])
    assert {len(run.times[f"hit {i}"]) for i in range(16)} == {2}
    assert [len(plan.chunks) for plan in run.plans[-2:]] == [16, 16]


def test_a_long_prompt_takes_what_cached_beginnings_leave():
    stem = [7] * 2000
    warm = (0.0, make_request("warm", [*stem, 1], max_tokens=1))
    hits = [(1 + 0.01 * i, make_request(f"hit {i}", [*stem, *[10 + i] * 10], max_tokens=1)) for i in range(1, 9)]
    settings = config(block_size=16, num_blocks=4000, short_prompts_pass=True)
    run = Run(settings, accelerator, [warm, (1.0, make_request("long", 4000)), *hits])
    assert run.first("long") <= math.ceil(4080 / 512) * accelerator(512) + 1e-9


def test_a_beam_search_with_all_seats_reads_its_prompt_alone():
    arrivals = [(0.0, make_request("beams", 4000, num_seats=4)), (0.001, make_request("short", 600))]
    run = Run(config(short_prompts_pass=True, max_num_seqs=4), accelerator, arrivals)
    assert run.first("beams") <= math.ceil(4000 / 512) * accelerator(512) + 1e-9


def test_a_head_without_seats_holds_up_no_prompt_that_is_read():
    scheduler = Scheduler(config(short_prompts_pass=True, max_num_seqs=4, max_num_batched_tokens=64))
    scheduler.add_request(make_request("first", 600, max_tokens=1))
    plans = list[StepPlan]()
    for step in range(60):
        if step == 1:
            scheduler.add_request(make_request("seatless", 1000, num_seats=4))
            scheduler.add_request(make_request("read", 500, max_tokens=2))
        for number in range(2 * (step > 1)):
            scheduler.add_request(make_request(f"short {step} {number}", 60, max_tokens=2))
        plan = scheduler.plan()
        assert plan is not None
        plans.append(plan)
        tokens = [5 for _ in plan.chunks]
        scheduler.commit(plan, StepResult(tokens, [None] * len(tokens), [[]] * len(tokens)))
    assert sum(len(c.token_ids) for plan in plans for c in plan.chunks if c.request_id == "seatless") > 100


def test_streams_take_nothing_of_a_step_that_pools():
    scheduler = Scheduler(config(short_prompts_pass=True, max_num_seqs=300))

    def step() -> StepPlan:
        plan = scheduler.plan()
        assert plan is not None
        tokens = [5 for _ in plan.chunks]
        scheduler.commit(plan, StepResult(tokens, [None] * len(tokens), [[]] * len(tokens), [None] * len(tokens)))
        return plan

    for _, request in streams(256, 50, prompt=1):
        scheduler.add_request(request)
    step()
    for number in range(2):
        scheduler.add_request(make_request(f"pooled {number}", 1000, task="embed"))
    plan = max((step() for _ in range(2)), key=lambda plan: plan.kind is StepKind.POOL)
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [512]


@pytest.mark.parametrize("seed", range(12, 18))
def test_prompts_of_many_seats_and_with_cached_beginnings_come_to_their_end(seed: int):
    rng, stem, names = random.Random(seed), [7] * 16, map(str, itertools.count())
    simulation = Simulation(make_config(short_prompts_pass=True, max_num_seqs=4, max_num_batched_tokens=8))
    for step in range(60):
        if step % 20 < 4:
            simulation.add(
                make_request(f"l{next(names)}", rng.randrange(40, 60), max_tokens=1, num_seats=rng.choice([1, 1, 4]))
            )
        while step % 20 >= 3 and simulation.scheduler.stats().num_waiting_reqs < 8:
            prompt = stem[: rng.choice([0, 0, 16])]
            prompt = prompt + [rng.randrange(50) for _ in range(rng.choice([4, 8, 12]))]
            simulation.add(make_request(f"s{next(names)}", prompt, max_tokens=2))
        simulation.step(seed % 3)
        simulation.check()
    simulation.run(seed % 3)
    assert simulation.scheduler.stats().prefix_cache_hits


def test_only_the_times_of_steps_without_other_work_are_learned():
    simulation = Simulation(make_config(num_media_rows=64, num_adapter_slots=1))
    prompt, media = make_prompt([[1, 2], PICTURES[0], [3]], has_rope=False)
    requests = [
        make_request("pooled", 16, task="embed"),
        make_request("seeing", prompt, media=media, max_tokens=1),
        msgspec.structs.replace(make_request("adapted", 16, max_tokens=1, salt="adapter"), adapter=7),
        make_request("plain", 16, max_tokens=1),
    ]
    for request in requests:
        simulation.add(request)
        assert simulation.run() == 1
        is_learned = simulation.scheduler._times.seconds(16) is not None
        assert is_learned == (request.request_id == "plain")


@pytest.mark.parametrize(("sight", "seed"), [("tiny", 4), ("tiny-both-sides", 12), ("both-sides", 8)])
def test_prompts_that_wait_for_rows_of_pictures_get_stuck_with_nobody(sight: str, seed: int):
    simulation = Simulation(make_config(short_prompts_pass=True, **SIGHTS[sight]))
    simulation.run_arriving(with_pictures(workload(seed, 24), seed), seed, seed % 3)


def test_prompts_that_are_not_cut_have_no_shares() -> None:
    config = make_config(enable_chunked_prefill=False, short_prompts_pass=True, step_target=StepTarget(0.0, 1.5))
    simulation = Simulation(config)
    simulation.add(make_request("stream", 3, max_tokens=20))
    simulation.step()
    for name, length in (("long", 30), ("short", 5)):
        simulation.add(make_request(name, length))
    whole: dict[str, int] = {}
    while simulation.scheduler.has_unfinished_requests():
        plan = simulation.plan()
        assert plan is not None
        for chunk in plan.chunks:
            if chunk.start == 0:
                whole[chunk.request_id] = len(chunk.token_ids)
        simulation.commit()
    assert whole == {"long": 30, "short": 5}

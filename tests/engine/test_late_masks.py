"""A late mask delays its own request, and the others by no more than a step, by a simulated clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import pytest

from jaxllm.constraints.token_masks import TokenMasks
from jaxllm.core_messages import Clip, EngineCoreRequest
from jaxllm.engine.core import engine_core as core_module
from jaxllm.engine.core.engine_core import COMPILE_WAIT, MASK_POLL, MASK_WAIT, EngineCore
from jaxllm.sampling_params import SamplingParams, StructuredOutputsParams
from jaxllm.scheduling.config import GroupConfig, SchedulerConfig
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.scheduler import Scheduler

NEVER = 1e9


class Clock:
    """A simulated clock: time passes only in waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class TimedRunner:
    """A device that runs one step after another, each for `seconds`."""

    is_compiling, is_warm, num_compiled, num_awaited = False, True, 0, 0

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.plans: list[tuple[float, list[str]]] = []
        """When each step was sent, and for whom."""
        self._free_at = 0.0

    def check_clip(self, clip: Clip | None) -> None:
        assert clip is None

    def run(self, plan: StepPlan, masks: Sequence[object]) -> TimedStep:
        self.plans.append((self.clock.now, [chunk.request_id for chunk in plan.chunks]))
        self._free_at = max(self._free_at, self.clock.now) + self.seconds
        return TimedStep(self.clock, plan, self._free_at)


class TimedStep:
    def __init__(self, clock: Clock, plan: StepPlan, done_at: float) -> None:
        self.clock, self.plan, self.done_at = clock, plan, done_at

    def is_done(self) -> bool:
        return self.clock.now >= self.done_at

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.done_at)
        count = len(self.plan.chunks)
        return StepResult(token_ids=[1] * count, logprobs=[None] * count, prompt_logprobs=[[] for _ in range(count)])


class TimedMasks(TokenMasks):
    """Makes the mask after each token of a structured request in `seconds`."""

    @property
    def is_empty(self) -> bool:
        return False

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(1000, None, None)
        self.clock, self.seconds = clock, seconds
        self.ready_at: dict[str, float] = {}
        """When the next mask of each structured request is there."""

    def add(self, request: EngineCoreRequest) -> None:
        if request.sampling_params.structured_outputs is not None:
            self.ready_at[request.request_id] = self.clock.now

    def late(self) -> set[str]:
        return {name for name, ready_at in self.ready_at.items() if ready_at > self.clock.now}

    def wait(self, timeout: float) -> None:
        end = self.clock.now + timeout
        self.clock.now = min([end, *(each for each in self.ready_at.values() if each > self.clock.now)])

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        if request_id in self.ready_at:
            self.ready_at[request_id] = self.clock.now + self.seconds

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.ready_at.pop(request_id, None)


class World:
    """A core whose steps and masks take the time that a test says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, step: float, mask: float, overlap: bool, names: Sequence[str]
    ) -> None:
        """Names that begin with "s" are those of structured requests."""
        self.clock = Clock()
        monkeypatch.setattr(core_module, "time", SimpleNamespace(monotonic=self.clock.monotonic))
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=512,
                block_size=4,
                groups=(GroupConfig(num_blocks=999),),
            )
        )
        self.runner, self.masks = TimedRunner(self.clock, step), TimedMasks(self.clock, mask)
        self.core = EngineCore(scheduler, self.runner, self.masks, overlap=overlap)  # pyright: ignore[reportArgumentType]
        self.times: dict[str, list[float]] = {name: [] for name in names}
        """When each request got its tokens."""
        for name in names:
            structured = StructuredOutputsParams(regex="a*") if name.startswith("s") else None
            params = SamplingParams(structured_outputs=structured)
            self.core.add_request(
                EngineCoreRequest(
                    request_id=name,
                    prompt_token_ids=[1, 2, 3],
                    sampling_params=params,
                    eos_token_id=None,
                    max_tokens=400,
                    seed=0,
                    arrival_time=0.0,
                )
            )

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for output in self.core.step().all_outputs():
                self.times[output.request_id] += [self.clock.now] * len(output.new_token_ids)

    def gaps(self, name: str) -> list[float]:
        """Return the seconds between the tokens of a request."""
        times = self.times[name]
        return [after - before for before, after in itertools.pairwise(times)]


MIXES = [["s", "p"], ["s", "p", "p2", "p3"], ["s", "s2", "s3", "p"]]


@pytest.mark.parametrize("names", MIXES)
@pytest.mark.parametrize("step", [0.001, 0.01, 0.04])
def test_a_late_mask_holds_the_others_no_longer_than_the_step_in_flight(
    monkeypatch: pytest.MonkeyPatch, step: float, names: list[str]
) -> None:
    world = World(monkeypatch, step=step, mask=NEVER, overlap=True, names=names)
    world.run(40)
    assert len(world.times["s"]) == 1, "its second token needs a mask that never comes"
    gaps = world.gaps("p")
    assert len(gaps) > 30
    # The step in flight when the mask became late, and one that was planned when it had ended.
    assert max(gaps) <= 2 * step + 2 * MASK_POLL
    assert max(gaps[3:]) <= step + MASK_POLL + 1e-9


@pytest.mark.parametrize("names", MIXES)
@pytest.mark.parametrize("step", [0.001, 0.01, 0.04])
def test_where_no_step_is_in_flight_the_wait_is_as_long_as_the_last_step_took(
    monkeypatch: pytest.MonkeyPatch, step: float, names: list[str]
) -> None:
    world = World(monkeypatch, step=step, mask=NEVER, overlap=False, names=names)
    world.run(40)
    assert len(world.times["s"]) == 1
    gaps = world.gaps("p")
    assert len(gaps) > 30
    assert max(gaps) <= 2 * step + MASK_POLL + 1e-9


def test_a_long_step_does_not_make_the_next_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that had to wait for the compiler."""
    world = World(monkeypatch, step=60.0, mask=NEVER, overlap=False, names=["s", "p"])
    world.run(1)
    world.runner.seconds = 0.01
    world.run(2)
    (_, first), (second, _) = world.runner.plans[0], world.runner.plans[1]
    assert first == ["s", "p"]
    assert second - 60.0 <= MASK_WAIT + MASK_POLL


@pytest.mark.parametrize("overlap", [True, False])
def test_who_waits_for_nobody_else_waits_in_small_parts(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """With nothing else to run a step looks for other work again soon."""
    world = World(monkeypatch, step=0.01, mask=NEVER, overlap=overlap, names=["s"])
    world.run(5)
    before = world.clock.now
    world.run(1)
    assert 0 < world.clock.now - before <= 0.01 + MASK_POLL + COMPILE_WAIT


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("names", MIXES)
@pytest.mark.parametrize("mask", [0.0, 0.0001, 0.004, 0.009])
def test_a_mask_that_comes_within_a_step_costs_its_request_no_turn(
    monkeypatch: pytest.MonkeyPatch, mask: float, names: list[str], overlap: bool
) -> None:
    """The wait ends as soon as the mask is there."""
    step = 0.01
    world = World(monkeypatch, step=step, mask=mask, overlap=overlap, names=names)
    world.run(60)
    # Where most requests have masks to wait for, nothing is sent before they are made; else every other step is theirs.
    waits_for_masks = not overlap or sum(name.startswith("s") for name in names) * 2 > len(names)
    longest = step + mask if waits_for_masks else 2 * step
    for name in world.times:
        if name.startswith("s"):
            assert len(world.gaps(name)) > 20
            assert max(world.gaps(name)) <= longest + 2 * MASK_POLL
    if waits_for_masks:
        assert max(world.gaps("p")) <= step + mask + 1e-9


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("names", MIXES)
@pytest.mark.parametrize("mask", [0.015, 0.05, 0.3])
def test_who_had_to_sit_out_takes_part_as_soon_as_the_mask_is_there(
    monkeypatch: pytest.MonkeyPatch, mask: float, names: list[str], overlap: bool
) -> None:
    step = 0.01
    world = World(monkeypatch, step=step, mask=mask, overlap=overlap, names=names)
    world.run(200)
    gaps = world.gaps("s")
    assert len(gaps) >= 3
    # Its mask, then at most the steps that were sent or planned when it came, and its own.
    assert max(gaps) <= mask + 3 * step + 2 * MASK_POLL
    assert max(world.gaps("p")) <= 2 * step + 2 * MASK_POLL

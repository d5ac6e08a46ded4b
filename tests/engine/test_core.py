"""The core's loop over a fake device: overlap, failure, aborts; and the real scheduler under it."""

from __future__ import annotations

import weakref

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.engine.messages import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.scheduler import Scheduler


class FakeRunner:
    """Samples the step's number; remembers how many steps were launched and waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fail_at: int | None = None

    def run(self, plan: StepPlan) -> FakeStep:
        self.events.append(f"launch {plan.step_id}")
        return FakeStep(self, plan)

    def warm_up(self) -> None:
        """Nothing to compile."""

    def shutdown(self) -> None:
        """Nothing to stop."""


class FakeStep:
    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self.runner, self.plan = runner, plan

    def result(self) -> StepResult:
        self.runner.events.append(f"wait {self.plan.step_id}")
        if self.runner.fail_at == self.plan.step_id:
            raise RuntimeError("the device fell over")
        count = len(self.plan.chunks)
        return StepResult(token_ids=[self.plan.step_id + 1] * count, logprobs=[None] * count)


def make_core(*, overlap: bool = True) -> tuple[EngineCore, FakeRunner, Scheduler]:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4, num_blocks=40)
    )
    runner = FakeRunner()
    return EngineCore(scheduler, runner, max_model_len=64, overlap=overlap), runner, scheduler  # pyright: ignore[reportArgumentType]


def add(core: EngineCore, request_id: str, max_tokens: int = 3) -> None:
    core.add_request(
        EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(range(9)),
            sampling_params=SamplingParams(),
            eos_token_id=None,
            max_tokens=max_tokens,
            seed=0,
            arrival_time=0.0,
        )
    )


def run_all(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(100):
        if not core.has_unfinished_requests():
            return tokens
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError("the core does not come to an end")


def test_the_next_step_is_launched_before_the_last_is_waited_for() -> None:
    core, runner, _ = make_core()
    add(core, "a")
    assert run_all(core) == {"a": [1, 2, 3]}
    assert runner.events == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]


def test_without_overlap_steps_alternate() -> None:
    core, runner, _ = make_core(overlap=False)
    add(core, "a")
    assert run_all(core) == {"a": [1, 2, 3]}
    assert runner.events == ["launch 0", "wait 0", "launch 1", "wait 1", "launch 2", "wait 2"]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_step_ends_its_requests_and_leaves_a_usable_engine(overlap: bool) -> None:
    core, runner, scheduler = make_core(overlap=overlap)
    add(core, "a", max_tokens=20)
    add(core, "b", max_tokens=20)
    runner.fail_at = 3
    with pytest.raises(RuntimeError, match="fell over"):
        run_all(core)
    aborted = core.step().outputs
    assert {output.request_id: output.finish_reason for output in aborted} == {"a": "abort", "b": "abort"}
    scheduler.check()
    assert scheduler.stats().num_blocks_in_use == 0
    runner.fail_at = None
    add(core, "a")
    [output] = [output for output in core.step().outputs + core.step().outputs if output.request_id == "a"][:1]
    assert output.num_cached_tokens == 0, "what the failed steps wrote must not be found again"


def test_an_abort_is_reported_once() -> None:
    core, _, scheduler = make_core()
    add(core, "a", max_tokens=20)
    core.step()
    core.abort_requests(["a", "unknown"])
    assert core.has_unfinished_requests()
    outputs = core.step().outputs
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "abort")]
    assert not core.has_unfinished_requests()
    assert scheduler.stats().num_blocks_in_use == 0


def test_an_id_may_be_used_again_before_its_abort_is_reported() -> None:
    core, _, scheduler = make_core()
    add(core, "a", max_tokens=20)
    core.step()
    core.abort_requests(["a"])
    add(core, "a")
    outputs = [output for _ in range(6) for output in core.step().outputs]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    scheduler.check()


def test_shutdown_ends_the_requests_and_drops_the_device() -> None:
    core, runner, scheduler = make_core()
    held = weakref.ref(runner)
    add(core, "a", max_tokens=20)
    core.step()
    del runner
    core.shutdown()
    core.shutdown()
    assert held() is None
    assert [(output.request_id, output.finish_reason) for output in core.step().outputs] == [("a", "abort")]
    assert not core.has_unfinished_requests()
    assert scheduler.stats().num_blocks_in_use == 0
    core.warm_up()
    with pytest.raises(RuntimeError, match="shut down"):
        add(core, "b")


def test_an_idle_core_does_nothing() -> None:
    core, runner, _ = make_core()
    assert core.step().outputs == []
    assert runner.events == []

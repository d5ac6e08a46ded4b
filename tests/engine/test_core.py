"""The core's loop over a fake device: overlap, failure, aborts; and the real scheduler under it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from jaxllm.constraints.token_masks import TokenMasks
from jaxllm.core_messages import Clip, EngineCoreOutput, EngineCoreRequest, RequestError
from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.core.engine_core import EngineCore
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import SamplingParams, StructuredOutputsParams
from jaxllm.scheduling.cache.block_residency import BlockResidency
from jaxllm.scheduling.config import GroupConfig, SchedulerConfig
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.scheduler import Scheduler


class FakeRunner:
    """Samples the step's number, and counts the steps that were launched and waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fail_at: int | None = None
        self.failure: BaseException | None = None
        """What `run` raises."""
        self.masks: list[object] = []

    def run(self, plan: StepPlan, masks: Sequence[object]) -> FakeStep:
        assert len(masks) == len(plan.chunks)
        if self.failure is not None:
            raise self.failure
        self.masks += masks
        self.events.append(f"launch {plan.step_id}")
        return FakeStep(self, plan)

    is_compiling, is_warm, num_compiled, num_awaited = False, True, 0, 0

    def check_clip(self, clip: Clip | None) -> None:
        assert clip is None

    def reset(self) -> None:
        self.events.append("reset")

    def warm_up(self) -> None:
        """Do nothing: there is nothing to compile."""

    def begin_shutdown(self) -> None:
        pass

    def shutdown(self) -> None:
        """Do nothing: there is nothing to stop."""


class FakeStep:
    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self.runner, self.plan = runner, plan

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        self.runner.events.append(f"wait {self.plan.step_id}")
        if self.runner.fail_at == self.plan.step_id:
            raise RuntimeError("the device fell over")
        count = len(self.plan.chunks)
        tokens = [self.plan.step_id + 1] * count
        return StepResult(token_ids=tokens, logprobs=[None] * count, prompt_logprobs=[[] for _ in tokens])


class ScriptedMasks(TokenMasks):
    """Masks with set answers: which requests have one, still compile, are at a dead end or are complete."""

    def __init__(self) -> None:
        super().__init__(1000, None, None)
        self.compiling: set[str] = set()
        self.ends: dict[str, RequestError] = {}
        self.complete: list[str] = []
        self.accepted: dict[str, list[int]] = {}
        self.removed: list[str] = []
        self.late_ids: set[str] = set()
        self.num_waits = 0

    @property
    def is_empty(self) -> bool:
        return False

    def late(self) -> set[str]:
        return set(self.late_ids)

    def is_ready(self, request_id: str) -> bool:
        return request_id not in self.compiling and request_id not in self.ends

    def wait(self, timeout: float) -> None:
        assert 0 < timeout < 1
        self.num_waits += 1

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.accepted.setdefault(request_id, []).extend(token_ids)

    def dead_ends(self) -> dict[str, RequestError]:
        return dict(self.ends)

    def completed(self) -> list[str]:
        return list(self.complete)

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.removed.append(request_id)
            self.ends.pop(request_id, None)
            if request_id in self.complete:
                self.complete.remove(request_id)


def make_core(
    *, overlap: bool = True, masks: TokenMasks | None = None, validators: Sequence[Any] = ()
) -> tuple[EngineCore, FakeRunner, Scheduler]:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=64,
            block_size=4,
            groups=(GroupConfig(num_blocks=40),),
        )
    )
    runner = FakeRunner()
    masks = masks or TokenMasks(1000, None, None)
    core = EngineCore(scheduler, runner, masks, overlap=overlap, validators=validators)  # pyright: ignore[reportArgumentType]
    return core, runner, scheduler


def add(
    core: EngineCore,
    request_id: str,
    max_tokens: int = 3,
    cache_salt: str | None = None,
    params: SamplingParams | None = None,
) -> None:
    core.add_request(
        EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(range(9)),
            sampling_params=params or SamplingParams(),
            eos_token_id=None,
            max_tokens=max_tokens,
            seed=0,
            arrival_time=0.0,
            cache_salt=cache_salt,
        )
    )


def run_all(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(100):
        if not core.has_unfinished_requests():
            return tokens
        for output in core.step().all_outputs():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError("the core does not come to an end")


def test_evictions_of_blocks_are_reported_once() -> None:
    core, _, scheduler = make_core()
    residency = scheduler.cache.groups[0].pool.residency = BlockResidency(1.0)
    for index in range(30):
        add(core, str(index))
    reported = 0
    while core.has_unfinished_requests():
        reported += len(core.step().evictions)
    assert reported > 20
    assert residency.take_evictions() == []


def test_the_next_step_is_launched_before_the_last_is_waited_for() -> None:
    core, runner, _ = make_core()
    add(core, "a")
    assert run_all(core) == {"a": [1, 2, 3]}
    assert runner.events == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]


def test_the_time_of_steps_is_unknown_while_the_host_waits_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner, scheduler = make_core()
    launch, seconds = runner.run, []

    def run(plan: StepPlan, masks: Sequence[object]) -> FakeStep:
        runner.num_awaited += plan.step_id == 1
        return launch(plan, masks)

    def record(_: int, taken: float) -> None:
        seconds.append(taken)

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(scheduler._times, "record", record)
    add(core, "a", max_tokens=6)
    run_all(core)
    num_steps = scheduler.stats().num_steps
    assert len(seconds) == num_steps - 2  # without the one that waits, and the one before it, which is read late


def test_a_step_launched_ahead_is_on_the_device_while_outputs_are_handled() -> None:
    core, runner, scheduler = make_core()
    add(core, "a")
    handled: list[tuple[list[int], str]] = []
    while core.has_unfinished_requests():
        outputs = core.step().all_outputs()
        core.launch_ahead()
        scheduler.check()
        handled += [(output.new_token_ids, runner.events[-1]) for output in outputs]
    assert handled == [([1], "launch 2"), ([2], "wait 1"), ([3], "wait 2")]  # nothing follows step 2
    assert runner.events == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]


def test_without_overlap_nothing_is_launched_ahead() -> None:
    core, runner, _ = make_core(overlap=False)
    add(core, "a")
    core.step()
    core.launch_ahead()
    assert runner.events == ["launch 0", "wait 0"]


def test_an_abort_with_two_steps_in_flight_is_reported_once() -> None:
    core, _, scheduler = make_core()
    add(core, "a", max_tokens=20)
    add(core, "b", max_tokens=5)
    core.step()
    core.launch_ahead()
    core.abort_requests(["a"])
    scheduler.check()
    outputs = core.step().all_outputs()
    core.launch_ahead()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "abort")]
    assert run_all(core) == {"b": [2, 3, 4, 5, 6]}
    assert scheduler.stats().num_blocks_in_use == 0


def test_a_reset_of_running_requests_takes_both_steps_in_flight() -> None:
    core, runner, scheduler = make_core()
    add(core, "a", max_tokens=5)
    core.step()
    core.launch_ahead()
    assert core.reset_prefix_cache(True)
    scheduler.check()
    assert runner.events == ["launch 0", "launch 1", "wait 0", "wait 1"]
    assert run_all(core) == {"a": [1, 2, 3, 4, 5]}


def test_a_failure_to_launch_ahead_comes_after_the_outputs_of_the_step_before() -> None:
    core, runner, scheduler = make_core()
    client = InprocClient(core)
    add(core, "short", max_tokens=3)
    add(core, "long", max_tokens=20)
    steps = [client.step(wait=True) for _ in range(3)]
    assert [len(step.all_outputs()) for step in steps if step is not None] == [0, 1, 2]
    runner.failure = RuntimeError("no launch")
    step = client.step(wait=True)
    assert step is not None
    assert {output.request_id: output.finish_reason for output in step.all_outputs()} == {
        "short": "length",
        "long": None,
    }
    with pytest.raises(RuntimeError, match="no launch"):
        client.step(wait=True)
    runner.failure = None
    step = client.step(wait=True)
    assert step is not None
    assert [(output.request_id, output.finish_reason) for output in step.outputs] == [("long", "error")]
    scheduler.check()
    assert client.step(wait=True) is None
    add(core, "next")
    assert run_all(core) == {"next": [6, 7, 8]}, "step 4 never ran"


def test_an_interrupted_launch_ahead_is_raised_at_once() -> None:
    core, runner, _ = make_core()
    add(core, "a", max_tokens=20)
    core.step()
    runner.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        core.launch_ahead()
    runner.failure = None
    assert [output.finish_reason for output in core.step().all_outputs()] == ["error"]
    assert not core.has_unfinished_requests()


def test_a_shutdown_forgets_a_failure_to_launch_ahead() -> None:
    core, runner, _ = make_core()
    add(core, "a", max_tokens=20)
    core.step()
    runner.failure = RuntimeError("no launch")
    core.launch_ahead()
    core.shutdown()
    assert [output.finish_reason for output in core.step().all_outputs()] == ["error"]
    assert not core.has_unfinished_requests()


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
    assert runner.events[-1] == "reset"
    aborted = core.step().all_outputs()
    assert {output.request_id: output.finish_reason for output in aborted} == {"a": "error", "b": "error"}
    failed = RequestError("internal", "A step failed: RuntimeError: the device fell over")
    assert [output.error for output in aborted] == [failed, failed]
    scheduler.check()
    assert scheduler.stats().num_blocks_in_use == 0
    runner.fail_at = None
    add(core, "a")
    [output] = [output for output in core.step().all_outputs() + core.step().all_outputs() if output.request_id == "a"][
        :1
    ]
    assert output.num_cached_tokens == 0, "what the failed steps wrote must not be found again"


def test_an_abort_is_reported_once() -> None:
    core, _, scheduler = make_core()
    add(core, "a", max_tokens=20)
    core.step()
    core.abort_requests(["a", "unknown"])
    assert core.has_unfinished_requests()
    outputs = core.step().all_outputs()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "abort")]
    assert not core.has_unfinished_requests()
    assert scheduler.stats().num_blocks_in_use == 0


def test_a_sequence_ends_once_with_an_error_whether_it_is_known_or_not() -> None:
    masks = ScriptedMasks()
    masks.compiling = {"slow"}
    core, _, scheduler = make_core(masks=masks)
    for name in ("a", "b", "slow"):
        add(core, name)
    core.step()
    why = RequestError("internal", "it could not be read")
    for name in ("a", "slow", "never heard of"):
        core.fail(name, why)
    outputs = run_steps(core)
    failed = [output.request_id for output in outputs if output.finish_reason == "error" and output.error == why]
    assert sorted(failed) == ["a", "never heard of", "slow"]
    assert {output.request_id for output in outputs} == {"a", "b", "slow", "never heard of"}
    assert not core.has_unfinished_requests()
    scheduler.check()
    assert set(masks.removed) >= {"a", "slow"}


def test_requests_that_a_class_of_logits_processors_refuses_end() -> None:
    seen: list[SamplingParams] = []

    def refuse(params: SamplingParams) -> None:
        seen.append(params)
        if params.extra_args:
            raise VLLMValidationError("Mine refuses them.", parameter="logits_processors")

    core, runner, _ = make_core(validators=[refuse])
    with pytest.raises(VLLMValidationError, match="Mine refuses"):
        core.check(SamplingParams(extra_args={"a": 1}))
    core.check(SamplingParams())
    add(core, "good")
    add(core, "bad", params=SamplingParams(extra_args={"a": 1}, n=3))
    outputs = run_steps(core)
    bad = {output.request_id: output.error for output in outputs if output.finish_reason == "error"}
    error = RequestError("invalid", "Mine refuses them.", "logits_processors")
    assert bad == {"bad": error, "bad#1": error, "bad#2": error}
    assert {output.request_id for output in outputs if output.finish_reason == "length"} == {"good"}
    assert len(seen) == 4, "once per request, not per sequence"
    assert len([event for event in runner.events if event.startswith("launch")]) == 3


def test_a_request_has_n_sequences_which_share_its_prompt() -> None:
    core, runner, scheduler = make_core()
    add(core, "a", params=SamplingParams(n=3))
    assert {name: len(tokens) for name, tokens in run_all(core).items()} == {"a": 3, "a#1": 3, "a#2": 3}
    assert scheduler.stats().num_scheduled_tokens < 2 * 9 + 9, "the prompt is computed once"
    assert runner.events


def test_only_requests_with_structured_outputs_are_said_to_be_admitted() -> None:
    masks = ScriptedMasks()
    masks.compiling = {"a"}
    core, _, _ = make_core(masks=masks)
    add(core, "a", params=SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    add(core, "plain")
    outputs = [*core.step().all_outputs(), *core.step().all_outputs()]
    masks.compiling = set()
    assert not any(output.is_admitted for output in outputs)
    admitted = [output for output in run_steps(core) if output.is_admitted]
    assert [(each.request_id, each.new_token_ids, each.finish_reason) for each in admitted] == [("a", [], None)]


def test_every_request_is_said_to_be_admitted_where_a_class_of_logits_processors_could_refuse_it() -> None:
    core, _, _ = make_core(validators=[lambda params: None])
    add(core, "a", params=SamplingParams(n=2))
    admitted = [output.request_id for output in run_steps(core) if output.is_admitted]
    assert admitted == ["a", "a#1"]


def test_only_what_a_request_asks_for_is_its_own_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError of the scheduler's own is the engine's failure, as any other is."""
    core, _, scheduler = make_core()
    add(core, "a")
    add(core, "a")
    (output,) = core.step().all_outputs()
    assert (output.error and (output.error.kind, output.error.parameter)) == ("invalid", "request_id")

    def fail(request: EngineCoreRequest) -> None:
        raise ValueError("math domain error")

    monkeypatch.setattr(scheduler, "add_request", fail)
    add(core, "b")
    outputs = [output for output in run_steps(core) if output.request_id == "b"]
    assert [output.error for output in outputs] == [RequestError("internal", "ValueError: math domain error")]


def test_requests_that_a_scheduler_loses_end_with_an_error() -> None:
    core, _, scheduler = make_core(overlap=False)
    add(core, "a")
    add(core, "b")
    scheduler._begin()
    with pytest.raises(RuntimeError, match="has lost 2 requests"):
        core.step()
    assert [(each.request_id, each.finish_reason) for each in core.step().all_outputs()] == [
        ("a", "error"),
        ("b", "error"),
    ]
    assert not core.has_unfinished_requests()


def test_shutdown_ends_the_requests_and_drops_the_device() -> None:
    core, runner, scheduler = make_core()
    held = weakref.ref(runner)
    add(core, "a", max_tokens=20)
    core.step()
    del runner
    core.shutdown()
    core.shutdown()
    assert held() is None
    ended = [(output.request_id, output.finish_reason, output.error) for output in core.step().all_outputs()]
    assert ended == [("a", "error", RequestError("internal", "The engine was shut down."))]
    assert not core.has_unfinished_requests()
    assert scheduler.stats().num_blocks_in_use == 0
    core.warm_up()
    with pytest.raises(RuntimeError, match="shut down"):
        add(core, "b")


def test_an_idle_core_does_nothing() -> None:
    core, runner, _ = make_core()
    assert core.step().all_outputs() == []
    assert runner.events == []


def test_requests_wait_for_their_grammars_and_others_do_not() -> None:
    masks = ScriptedMasks()
    masks.compiling = {"slow", "bad"}
    core, runner, _ = make_core(masks=masks)
    add(core, "slow")
    add(core, "bad")
    assert core.step().all_outputs() == []
    assert masks.num_waits == 1
    add(core, "plain")
    assert set(run_until(core, "plain")) == {"plain"}
    assert masks.num_waits == 1
    no_rule = RequestError("invalid", "no such rule", "structured_outputs")
    masks.compiling, masks.ends = {"slow"}, {"bad": no_rule}
    (output,) = core.step().all_outputs()
    assert (output.request_id, output.finish_reason, output.error) == ("bad", "error", no_rule)
    masks.compiling = set()
    assert len(run_all(core)["slow"]) == 3
    assert set(masks.accepted) == {"slow", "plain"}
    assert runner.masks == [None] * len(runner.masks)


@pytest.mark.parametrize("salt", ["\ud800", 3])
def test_a_request_that_cannot_be_hashed_ends_alone(salt: Any) -> None:
    """At once, or, where it waited for its grammar, in the step that would have let it in."""
    masks = ScriptedMasks()
    core, _, scheduler = make_core(masks=masks)
    add(core, "plain")
    add(core, "refused", cache_salt=salt)
    assert masks.removed.count("refused") == 2  # before it is added, and after the failure
    masks.compiling = {"late"}
    add(core, "late", cache_salt=salt)
    masks.compiling = set()
    outputs = run_steps(core)
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason is not None}
    assert ends == {"refused": "error", "late": "error", "plain": "length"}
    kind = "invalid" if isinstance(salt, str) else "internal"
    assert {output.error.kind for output in outputs if output.error is not None} == {kind}
    scheduler.check()


def run_steps(core: EngineCore) -> list[EngineCoreOutput]:
    return [output for _ in range(10) for output in core.step().all_outputs()]


def test_requests_that_wait_for_grammars_can_be_aborted() -> None:
    masks = ScriptedMasks()
    masks.compiling = {"slow", "other"}
    core, runner, _ = make_core(masks=masks)
    add(core, "slow")
    add(core, "other")
    core.abort_requests(["slow"])
    assert [(output.request_id, output.finish_reason) for output in core.step().all_outputs()] == [("slow", "abort")]
    core.shutdown()
    assert [(output.request_id, output.finish_reason) for output in core.step().all_outputs()] == [("other", "error")]
    assert set(masks.removed) >= {"slow", "other"}
    assert runner.events == []


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_end_only_their_own_requests(overlap: bool) -> None:
    masks = ScriptedMasks()
    core, _, scheduler = make_core(masks=masks, overlap=overlap)
    for request_id in ("stuck", "complete", "plain"):
        add(core, request_id, max_tokens=6)
    while not masks.accepted.get("plain"):
        core.step()
    nothing = RequestError("invalid", "nothing may follow")
    masks.ends, masks.complete = {"stuck": nothing}, ["complete"]
    ended = {}
    for _ in range(20):
        for output in core.step().all_outputs():
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason, output.error
    assert ended == {"stuck": ("error", nothing), "complete": ("stop", None), "plain": ("length", None)}
    assert len(masks.accepted["plain"]) == 5  # the sixth ended it
    scheduler.check()
    assert scheduler.stats().num_blocks_in_use == 0


def run_until(core: EngineCore, request_id: str) -> dict[str, list[int]]:
    """Step until a request ends; return everyone's tokens."""
    tokens: dict[str, list[int]] = {}
    for _ in range(20):
        for output in core.step().all_outputs():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.request_id == request_id and output.finish_reason is not None:
                return tokens
    raise AssertionError(f"{request_id} does not end")


def test_who_waits_for_a_mask_keeps_nobody_else_waiting() -> None:
    masks = ScriptedMasks()
    core, _, _ = make_core(masks=masks)
    add(core, "a")
    add(core, "b")
    core.step()
    masks.late_ids = {"a"}
    for _ in range(10):
        core.step()
    assert masks.accepted == {"a": [1], "b": [2, 3]}, "the last token ends b"
    assert masks.num_waits > 0, "a step with nothing to run waits for the mask"
    masks.late_ids = set()
    assert len(run_all(core)["a"]) == 2

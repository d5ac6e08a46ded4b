"""The host's work per step is counted rather than timed: transfers, and Python instructions."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from types import CodeType
from typing import Any, cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxllm.constraints.bits import RowMask
from jaxllm.core_messages import TokenLogprobs
from jaxllm.execution.batch import build
from jaxllm.execution.kept_rows import KeptRows
from jaxllm.execution.model_runner import ModelRunner, RunningStep
from jaxllm.execution.packing import allocate
from jaxllm.execution.programs.background import Programs
from jaxllm.execution.programs.shapes import ProgramKey
from jaxllm.execution.step import StepOutput, StepShape
from jaxllm.sampling.logprobs import Logprobs
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import Chunk, Owner, StepPlan
from tests.execution.support import make_compiler, make_runner


def make_plan(*num_tokens: int, params: SamplingParams | None = None) -> StepPlan:
    """Return a step of chunks so long, each from its request's start."""
    chunks = tuple(
        Chunk(
            owner=Owner(request_id=str(i), num_prompt_tokens=count, params=params or SamplingParams(), seed=i),
            start=0,
            token_ids=array("i", range(1, count + 1)),
            previous_row=None,
            block_ids=(array("i", range(1, -(-count // 16) + 1)),),
            samples=True,
            num_output_tokens=0,
        )
        for i, count in enumerate(num_tokens)
    )
    return StepPlan(step_id=0, others=chunks, num_preempted=0)


class FakePrograms(Programs[ProgramKey]):
    """Stands in for the programs of steps: computes nothing and keeps what it is given."""

    def __init__(self, others: Programs[ProgramKey], num_rows: int) -> None:
        super().__init__(lambda shape: None, others.keys, ahead=False)
        self._others = others
        self.arguments: tuple[Any, ...] = ()
        row_s, row_sk = jnp.zeros(num_rows), jnp.zeros((num_rows, 5))
        self._plain = StepOutput(row_s.astype(jnp.int32), None)
        self._full = StepOutput(row_s.astype(jnp.int32), Logprobs(row_s, row_s, row_sk, row_sk, row_sk, None))

    def get(self, key: ProgramKey) -> Any:
        if not isinstance(key, StepShape):
            return self._others.get(key)

        def program(params: Any, state: Any, *arguments: Any) -> tuple[Any, StepOutput]:
            self.arguments = arguments
            return state, self._full if key.is_full else self._plain

        return program


def make_ready(runner: ModelRunner, plan: StepPlan) -> None:
    """Let a step make what every later one finds on the device."""
    runner.launcher.programs = cast(Any, FakePrograms(runner.programs, runner.compiler.shapes.max_rows))
    runner.run(plan, [None] * len(plan.chunks)).result()


def arguments_of(runner: ModelRunner, plan: StepPlan, masks: Any = None) -> tuple[Any, ...]:
    """Return what a step gives to its program besides parameters and state, having sent nothing on its own."""
    programs = FakePrograms(runner.programs, runner.compiler.shapes.max_rows)
    runner.launcher.programs = cast(Any, programs)
    with jax.transfer_guard_host_to_device("disallow_explicit"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "transfer_guard_host_to_device", nullcontext)  # which the runner would lift the guard with
        runner.run(plan, masks or [None] * len(plan.chunks))
    return programs.arguments


@pytest.mark.parametrize("num_tokens", [(2,), (200,), (1,) * 64, (1,) * 40 + (9, 70, 3)])
def test_two_arrays_are_sent_whatever_the_step(num_tokens: tuple[int, ...]) -> None:
    runner = make_runner()
    full = make_plan(*num_tokens, params=SamplingParams(logprobs=2, top_k=3))
    make_ready(runner, full)
    rare = []
    for plan in (make_plan(*num_tokens), full, full):
        previous, ints, floats, unused = arguments_of(runner, plan)
        assert isinstance(previous, jax.Array)
        assert [type(ints), type(floats)] == [np.ndarray, np.ndarray]
        rare.append(unused)
    assert rare[0] is None
    # On the device since the start, and the same array each time.
    assert all(isinstance(x, jax.Array) and x is y for x, y in zip(rare[1], rare[2], strict=True))


@pytest.mark.parametrize(
    ("params", "num_sent", "num_masks"),
    [
        ({"logit_bias": {1: 2.0}}, 2, 1),
        ({"logprob_token_ids": [3]}, 1, 2),
        ({"logprobs": 1}, 0, 2),
    ],
)
def test_rare_arrays_are_sent_only_when_used(params: dict[str, Any], num_sent: int, num_masks: int) -> None:
    runner = make_runner()
    plan = make_plan(5, 3, params=SamplingParams(**params))
    make_ready(runner, plan)
    assert sum(isinstance(x, np.ndarray) for x in arguments_of(runner, plan)[-1]) == num_sent
    bits_w = np.full(10, -1, np.int32)
    masked = arguments_of(runner, plan, [RowMask(bits_w, bits_w), None])
    assert sum(isinstance(x, np.ndarray) for x in masked[-1]) == num_sent + num_masks


def test_the_transfer_guard_sees_what_a_step_would_send() -> None:
    with jax.transfer_guard_host_to_device("disallow_explicit"), pytest.raises(Exception, match="host-to-device"):
        jax.device_put(np.ones(3))


def count_instructions(function: Callable[[], Any]) -> int:
    """Return how many bytecode instructions a call executes: a comprehension calls nothing, yet it loops."""
    count, thread = 0, threading.get_ident()

    def note(code: CodeType, offset: int) -> None:
        nonlocal count
        count += threading.get_ident() == thread

    monitoring, tool = sys.monitoring, 3
    monitoring.use_tool_id(tool, "count_instructions")
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, note)
    monitoring.set_events(tool, monitoring.events.INSTRUCTION)
    try:
        function()
    finally:
        monitoring.set_events(tool, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(tool)
    return count


def count_build(plan: StepPlan) -> int:
    """Return the instructions that `build` executes for a step."""
    compiler = make_compiler(max_num_batched_tokens=512)
    shape = compiler.shapes.batch_shape(plan)
    masks, kept = [None] * len(plan.chunks), KeptRows(len(plan.chunks), 1, shape.max_blocks)
    build(plan, allocate(shape), 16, 300, masks, kept.take(plan))
    return count_instructions(lambda: build(plan, allocate(shape), 16, 300, masks, kept.take(plan)))


def test_build_has_no_loop_over_tokens_or_blocks() -> None:
    assert count_build(make_plan(2)) == count_build(make_plan(512))
    assert count_build(make_plan(2, 2, 2)) == count_build(make_plan(2, 100, 400))


def test_build_does_little_per_sequence() -> None:
    few, many = (count_build(make_plan(*[1] * n, params=SamplingParams(logprobs=1))) for n in (8, 64))
    assert (many - few) / (64 - 8) < 100


def test_the_counter_sees_a_loop() -> None:
    tokens = array("i", range(100))
    assert count_instructions(lambda: [token for token in tokens]) > 100  # noqa: C416


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    chunks = [
        msgspec.structs.replace(
            chunk, owner=msgspec.structs.replace(chunk.owner, params=SamplingParams(logprobs=asked)), samples=samples
        )
        for chunk, (asked, samples) in zip(
            make_plan(1, 1, 1, 1, 1).chunks,
            [(None, True), (0, True), (2, True), (-1, True), (1, False)],
            strict=True,
        )
    ]
    top_ids_sk = np.arange(8 * 3).reshape(8, 3)
    logprobs = Logprobs(
        sampled_s=jnp.arange(8) - 0.5,
        rank_s=jnp.arange(8) + 1,
        asked_sn=jnp.zeros((8, 4)),
        top_ids_sk=jnp.array(top_ids_sk),
        top_sk=jnp.array(-1.0 - top_ids_sk),
        all_sv=None,
    )
    step = RunningStep(StepPlan(0, tuple(chunks), 0), StepOutput(jnp.arange(8) + 100, logprobs))
    assert step.result().token_ids == [100, 101, 102, 103, 104]
    assert step.result().logprobs == [
        None,
        [TokenLogprobs([101], [0.5], 2)],
        [TokenLogprobs([102, 6, 7], [1.5, -7.0, -8.0], 3)],
        [TokenLogprobs([103, 9, 10, 11], [2.5, -10.0, -11.0, -12.0], 4)],
        None,
    ]

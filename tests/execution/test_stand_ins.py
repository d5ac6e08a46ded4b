"""Where a program takes seconds to compile, a larger one runs its steps meanwhile, and the answers are the same."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from jaxllm.execution import model_runner
from jaxllm.execution.launcher import Launcher
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.packing import Bucket
from jaxllm.execution.programs.background import FAST, Programs
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import ProgramKey, Upkeep
from jaxllm.execution.step import StepShape
from jaxllm.loading.load import init_dummy
from jaxllm.models import LayerLoop
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import Chunk, Owner, StepPlan
from tests.execution.support import make_compiler

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("quick_compile")]

NUM_BLOCKS = 33
PARAMS = {False: SamplingParams(temperature=0), True: SamplingParams(temperature=0, presence_penalty=1.5, logprobs=2)}
"""The parameters of a plain step, and of a full one."""


class Gated:
    """Programs that a thread compiles ahead once the test lets it; the largest are there."""

    def __init__(self, compiler: StepCompiler) -> None:
        self.compiler, self.gate = compiler, threading.Event()
        self.programs = Programs(self._compile, compiler.shapes.programs(), ahead=True, pace=FAST)

    def _compile(self, key: ProgramKey) -> object:
        if isinstance(key, StepShape) and key.batch.bucket != self.compiler.shapes.buckets[-1]:
            assert self.gate.wait(60)
        return self.compiler.compile(key, NUM_BLOCKS)


@pytest.fixture(scope="module")
def gated() -> Iterator[tuple[ModelRunner, Gated]]:
    """Return a runner on a CPU that takes it for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxllm.execution.programs.compiler.PLATFORMS", {"gpu": "cpu"})
        compiler = make_compiler(1, loop=LayerLoop.SCAN, platform="gpu", max_num_seqs=8, max_num_batched_tokens=16)
        made = Gated(compiler)
        runner = ModelRunner(
            Launcher(compiler, made.programs, lambda: init_dummy(compiler.model.specs.param_specs(), 0))
        )
        yield runner, made
        made.gate.set()
        runner.shutdown()


def run(runner: ModelRunner, lengths: list[int], tokens: array[int], params: SamplingParams) -> list[int]:
    """Return what a step of new prompts samples; the prompts are cut from `tokens`."""
    chunks = [
        Chunk(
            owner=Owner(
                request_id=str(i),
                num_prompt_tokens=length,
                params=params,
                seed=i,
                count_row=None if params is PARAMS[False] else i + 1,
            ),
            start=0,
            token_ids=tokens[i : i + length],
            previous_row=None,
            block_ids=(array("i", [i + 1]),),
            samples=True,
            num_output_tokens=0,
            history=None if params is PARAMS[False] else tokens[i : i + length],
        )
        for i, length in enumerate(lengths)
    ]
    plan = StepPlan(step_id=0, others=tuple(chunks), num_preempted=0)
    return list(runner.run(plan, [None] * len(chunks)).result().token_ids)


def test_a_new_bucket_waits_for_no_compiler_and_answers_the_same(
    gated: tuple[ModelRunner, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, made = gated
    compiler, programs = made.compiler, made.programs
    assert compiler.shapes.buckets == (Bucket(8, 8), Bucket(16, 8))
    tokens = array("i", np.random.default_rng().integers(1, 300, 40).tolist())
    steps = [(lengths, is_full) for is_full in (False, True) for lengths in ([3], [1, 5], [1] * 8)]
    for is_full in (False, True):
        run(runner, [16], tokens, PARAMS[is_full])  # nothing larger stands in
    builds = Mock(side_effect=model_runner.build)
    monkeypatch.setattr(model_runner, "build", builds)
    early = [run(runner, lengths, tokens, PARAMS[is_full]) for lengths, is_full in steps]
    assert builds.call_count == len(steps), "the inputs are packed once, for the program that runs"
    small = [shape for shape in compiler.shapes.steps() if shape.batch.bucket != compiler.shapes.buckets[-1]]
    assert not any(shape in programs for shape in small)
    made.gate.set()
    runner.warm_up()
    assert all(shape in programs for shape in small)
    assert [run(runner, lengths, tokens, PARAMS[is_full]) for lengths, is_full in steps] == early


class Traced(StepCompiler):
    """Counts the programs that are traced at once; compiling ends when three are compiled."""

    num_traced, most = 0, 0
    meeting = threading.Barrier(3)

    def lower(self, key: ProgramKey, num_blocks: int) -> Any:
        self.num_traced += 1
        self.most = max(self.most, self.num_traced)
        time.sleep(0.01)
        self.num_traced -= 1
        return SimpleNamespace(compile=lambda compiler_options: self.meeting.wait(10))


def test_one_thread_at_a_time_traces_and_all_compile() -> None:
    plain = make_compiler(1, loop=LayerLoop.SCAN)
    compiler = Traced(plain.config, plain.model, plain.mesh)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda key: compiler.compile(key, NUM_BLOCKS), compiler.shapes.steps()[:3]))
    assert compiler.most == 1
    with compiler._tracing, ThreadPoolExecutor(3) as threads:  # the small programs of the start wait for no other
        list(threads.map(lambda _: compiler.compile(Upkeep.MAKE_STATE, NUM_BLOCKS), range(3)))

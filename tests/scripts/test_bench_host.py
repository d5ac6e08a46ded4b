"""scripts/bench.py host: recorded answers stand in for the device."""

from __future__ import annotations

from typing import Any, cast

import jax
import pytest
from bench.host import Replay, Stopwatch

from jaxllm.execution.model_runner import RunningStep
from tests.execution.support import make_runner
from tests.execution.test_host_work import make_plan

pytestmark = pytest.mark.scripts


def test_a_replayed_step_gives_what_was_recorded() -> None:
    runner = make_runner(batch_invariant=True)
    plan = make_plan(2)
    step = runner.run(plan, [None])
    assert isinstance(step, RunningStep)
    recorded = jax.device_get(step._output)
    runner.launcher.programs = cast(Any, Replay([recorded], Stopwatch(), runner.programs.keys))
    assert runner.run(plan, [None]).result() == step.result()

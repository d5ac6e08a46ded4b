"""A device that computes nothing and takes a given time for each step, under a real scheduler and a real model runner.

`DeviceClock` says when steps begin and end: one after the other, as on one device. On `ProcessorTime` only the calling
thread's processor time passes, and waiting takes no time at all: what other programs on the machine do changes no
figure, and the gaps between steps are those of a processor of the host's own. On `WallTime` a wait sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxllm.execution.launcher import Launch, StepLaunch
from jaxllm.execution.packing import PackedInputs, unpack
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.step import StepOutput, StepShape
from jaxllm.sampling.logprobs import Logprobs

NUM_PARAMS = 24
"""The arrays of the parameters that the mock program takes, as many as a model with stacked layers has."""


class StepTimes(NamedTuple):
    """The milliseconds of a step on the device, by kind."""

    plain: float
    """A step of decodes."""
    chunk: float
    """A step with a chunk of several tokens."""
    full: float
    """A step with log-probabilities, penalties or masks."""
    per_token: float = 0.0
    """Added for each token of any step."""


class Time(Protocol):
    """What passes on the host."""

    def now(self) -> float:
        """Return seconds since some time."""
        ...

    def wait_until(self, moment: float) -> None:
        """Return when `now` is not before a moment."""
        ...


class WallTime:
    """Seconds as a clock shows them."""

    def now(self) -> float:
        """Return time.monotonic()."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, moment - time.monotonic()))


class ProcessorTime:
    """The calling thread's processor time, plus what it would have waited."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        """Return the seconds that the thread has worked and waited, less those that `excluded` took."""
        return time.thread_time() + self._waited

    def wait_until(self, moment: float) -> None:
        """Let the time pass at once."""
        self._waited += max(0.0, moment - self.now())

    def take_back(self, since: float) -> None:
        """Let the time since a moment not have passed: the mock's own work, which a device would do."""
        self._waited -= self.now() - since


class DeviceStep:
    """A step on the device's clock."""

    __slots__ = ("begins", "ends", "launched", "num_rows", "taken")

    def __init__(self, launched: float, begins: float, ends: float, num_rows: int) -> None:
        self.launched, self.begins, self.ends, self.num_rows = launched, begins, ends, num_rows
        self.taken: float | None = None
        """When the host had its result."""


class DeviceClock:
    """Runs steps one after the other, and remembers when each was launched, began, ended and was taken."""

    def __init__(self, times: StepTimes, passing: Time) -> None:
        self.times, self.passing = times, passing
        self.steps: list[DeviceStep] = []
        self._ends = 0.0

    def launch(self, launched: float, milliseconds: float, num_rows: int) -> DeviceStep:
        """Begin a step that was launched at a moment, once the one before has ended."""
        begins = max(launched, self._ends)
        self._ends = begins + milliseconds / 1e3
        step = DeviceStep(launched, begins, self._ends, num_rows)
        self.steps.append(step)
        return step

    def wait(self, step: DeviceStep) -> None:
        """Wait for the end of a step."""
        self.passing.wait_until(step.ends)
        if step.taken is None:
            step.taken = self.passing.now()


class _Tokens:
    """The tokens of a step: numpy has to wait for them."""

    def __init__(self, clock: DeviceClock, step: DeviceStep, tokens_s: np.ndarray) -> None:
        self._clock, self._step, self._tokens_s = clock, step, tokens_s

    def copy_to_host_async(self) -> None:
        """Do nothing."""

    def is_ready(self) -> bool:
        """Return whether the step has ended."""
        return self._clock.passing.now() >= self._step.ends

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del dtype, copy
        self._clock.wait(self._step)
        return self._tokens_s


class _HostArray(np.ndarray):
    """An array of log-probabilities, which is on the host at once."""

    def copy_to_host_async(self) -> None:
        """Do nothing."""


class _Programs:
    """Every program, as if it were compiled."""

    is_awaited, is_warm, num_compiled, num_awaited = False, True, 0, 0

    def __init__(self, compiler: StepCompiler) -> None:
        self.keys = tuple(compiler.shapes.programs())

    def __contains__(self, key: Any) -> bool:
        return True

    def nearest(self, keys: Sequence[Any]) -> Any:
        """Return the first one."""
        return keys[0]

    def wait(self) -> None:
        """Do nothing, as `begin_stop` and `stop` do."""

    begin_stop = stop = wait


class MockLauncher:
    """Takes the place of a `Launcher`: hands each step's inputs to the runtime, and lets the clock compute.

    A sequence's tokens are those of `tokens`, from a place that its seed gives, whatever else is in the batch.
    """

    def __init__(self, compiler: StepCompiler, clock: DeviceClock, tokens: Sequence[int]) -> None:
        self.compiler, self.clock = compiler, clock
        self.programs = _Programs(compiler)
        self._tokens = np.array(tokens, np.int32)
        self._params = [jax.numpy.zeros(1) for _ in range(NUM_PARAMS)]
        self._pool = jax.numpy.zeros(1)
        self._previous = jax.numpy.zeros(1)
        self._compiled: dict[Any, Any] = {}

    def launch(self, launch: Launch) -> StepOutput | None:
        """Run a step; other launches write to the device, and do nothing here."""
        if not isinstance(launch, StepLaunch):
            return None
        key = self.programs.keys[launch.program]
        assert isinstance(key, StepShape), "a mock device does not pool"
        self._send(launch)
        clock = self.clock
        began = clock.passing.now()
        inputs = unpack(launch.ints, launch.floats, key.batch)
        step = clock.launch(began, self._milliseconds(key, inputs), int(inputs.logit_rows.num_rows))
        tokens_s = self._sample(inputs)
        output = StepOutput(
            _Tokens(clock, step, tokens_s),  # pyright: ignore[reportArgumentType]
            self._logprobs(tokens_s, key.num_logprobs) if key.is_full else None,
        )
        if isinstance(clock.passing, ProcessorTime):
            clock.passing.take_back(began)
        return output

    def reset(self) -> None:
        """Do nothing: nothing is kept."""

    def _send(self, launch: StepLaunch) -> None:
        """Call a compiled program with the step's arguments: it adds two numbers."""
        arguments = (self._params, self._pool, self._previous, launch.ints, launch.floats)
        key = launch.ints.shape, launch.floats.shape
        if key not in self._compiled:
            began = self.clock.passing.now()
            self._compiled[key] = jax.jit(_add, donate_argnums=1, keep_unused=True).lower(*arguments).compile()
            if isinstance(self.clock.passing, ProcessorTime):
                self.clock.passing.take_back(began)
        self._pool = self._compiled[key](*arguments)

    def _milliseconds(self, key: StepShape, inputs: PackedInputs) -> float:
        times, ends_s = self.clock.times, np.asarray(inputs.sequences.query_ends_s)
        num_tokens, num_decodes = int(ends_s[-1]), int(inputs.sequences.num_decodes)
        kind = times.full if key.is_full else times.chunk if num_tokens > num_decodes else times.plain
        return kind + times.per_token * num_tokens

    def _sample(self, inputs: PackedInputs) -> np.ndarray:
        places_s = np.asarray(inputs.sampling.seeds_s2)[:, 1] % 65536 + np.asarray(inputs.sampling.positions_s)
        tokens_s = np.zeros(self.compiler.shapes.max_rows, np.int32)
        tokens_s[: len(places_s)] = self._tokens[places_s % len(self._tokens)]
        return tokens_s

    def _logprobs(self, tokens_s: np.ndarray, num: int) -> Logprobs:
        """Make the sampled token the most likely, and the text's tokens the next most likely."""
        num_rows = len(tokens_s)
        top_ids_sk = np.column_stack([tokens_s, *(np.full(num_rows, each) for each in self._tokens[: num - 1])])
        top_sk = np.broadcast_to(-0.5 - np.arange(num, dtype=np.float32), (num_rows, num))
        of_row = np.full(num_rows, -0.5, np.float32), np.ones(num_rows, np.int32)
        arrays = [*of_row, np.zeros((num_rows, 1), np.float32), top_ids_sk, top_sk]
        values: list[Any] = [*(each.view(_HostArray) for each in arrays), None]
        return Logprobs(*values)


def _add(params: Any, pool: Any, previous: Any, ints: Any, floats: Any) -> Any:
    return pool + params[0] + previous + ints[0] + floats[0]

"""Record host and device activity during some steps with JAX's profiler."""

from __future__ import annotations

import logging
import time

from jaxllm.config.profiler import GROUP, ProfilerConfig, check_profile_prefix
from jaxllm.exceptions import ProfilerAlreadyActiveError, VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records the steps between `start` and `stop`, or some of them."""

    def __init__(self, config: ProfilerConfig | None) -> None:
        """Make a profiler without a session; `start` refuses to begin one if the config names no profiler."""
        self._config = config or ProfilerConfig()
        self._is_active = self._is_recording = False
        self._prefix: str | None = None
        self._num_steps = self._first_step = 0
        self._end_step: int | None = None

    def start(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Begin a session; None takes the config's value. Raises VLLMValidationError."""
        config = self._require_profiler()
        if self._is_active:
            message = "A profiling session is already active. Call stop_profile() before starting another session."
            raise ProfilerAlreadyActiveError(message, parameter="start_profile")
        prefix = check_profile_prefix(prefix)
        delay = _check_steps("delay_iterations", delay_iterations, config.delay_iterations)
        most = _check_steps("max_iterations", max_iterations, config.max_iterations)
        self._prefix, self._num_steps, self._first_step = prefix, 0, delay
        self._end_step = delay + most if most else None
        if delay == 0:
            self._begin_recording()
        self._is_active = True

    def before_step(self) -> None:
        """Begin or end recording if this is the step for it."""
        if not self._is_active:
            return
        if self._num_steps == self._end_step and self._is_recording:
            self._end_recording()
        elif self._num_steps == self._first_step and not self._is_recording:
            self._begin_recording()
        self._num_steps += 1

    def stop(self) -> None:
        """End the session; its trace is written. Raises VLLMValidationError without a profiler."""
        self._require_profiler()
        if not self._is_active:
            logger.warning("The profiler was not started: there is nothing to stop.")
        self.close()

    def close(self) -> None:
        """End the session if there is one."""
        self._is_active = False
        if self._is_recording:
            self._end_recording()

    def _require_profiler(self) -> ProfilerConfig:
        if self._config.profiler is None:
            message = (
                "Profiling is not enabled. Give the engine "
                'profiler_config={"profiler": "torch", "torch_profiler_dir": "a folder"}.'
            )
            raise VLLMValidationError(message, parameter=GROUP)
        return self._config

    def _begin_recording(self) -> None:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._config.torch_profiler_with_stack)
        if self._prefix is not None:
            options.session_id = f"{self._prefix}_{time.strftime('%Y_%m_%d_%H_%M_%S')}"
        jax.profiler.start_trace(self._config.torch_profiler_dir, profiler_options=options)
        self._is_recording = True

    def _end_recording(self) -> None:
        import jax

        self._is_recording = False
        jax.profiler.stop_trace()
        logger.info("The profile is in %s.", self._config.torch_profiler_dir)


def _check_steps(name: str, value: int | None, default: int) -> int:
    return default if value is None else check_int(name, value, 0, INT32_MAX)

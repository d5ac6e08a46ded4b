"""Detect a hanging core by its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxllm.engine.transport.core_client import Programs
from jaxllm.engine.transport.wire import Heartbeat


class CoreWatch:
    """Judges by heartbeats whether a core hangs: a step takes for ever, or the process has stopped.

    It does not judge before the first heartbeat: a process that imports from a cold disk may take minutes to send it.
    """

    def __init__(
        self, step_seconds: float, silence_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Set the longest step or call, compiling not counted, and the longest silence, in seconds."""
        self._step_seconds, self._silence_seconds, self._clock = step_seconds, silence_seconds, clock
        self._looked = clock()
        self._heard: float | None = None
        self._last: Heartbeat | None = None

    @property
    def has_heard(self) -> bool:
        """Return whether there has been a heartbeat."""
        return self._heard is not None

    @property
    def programs(self) -> Programs:
        """Return how far the core's programs were compiled at the last heartbeat."""
        last = self._last
        return Programs(0, is_warm=False) if last is None else Programs(last.num_compiled, last.is_warm)

    def hear(self, beat: Heartbeat) -> None:
        """Take in a heartbeat."""
        self._heard, self._last = self._clock(), beat

    def complaint(self) -> str | None:
        """Return what is wrong; None if nothing is. To be called after all messages that have come are taken in."""
        now = self._clock()
        if self._heard is None:
            return None
        if now - self._looked > self._silence_seconds / 2:
            self._heard = now  # this process itself was stopped
        self._looked = now
        if now - self._heard > self._silence_seconds:
            return f"it has given no sign of life for {now - self._heard:.0f} s (JAXLLM_SILENCE_TIMEOUT)"
        last = self._last
        if last is not None and not last.is_compiling and last.step_seconds > self._step_seconds:
            return f"a step, or a call, has taken {last.step_seconds:.0f} s (JAXLLM_STEP_TIMEOUT)"
        return None

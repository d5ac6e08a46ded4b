"""The life of one replica: its core starts, serves, ends or drains, and is replaced when it has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jaxllm.core_messages import EngineCoreRequest, SchedulerStats, sequence_ids
from jaxllm.engine.client.remote_core import RemoteCore

_STEADY_SECONDS = 60.0
"""A core that has served this long is replaced at once when it fails; otherwise each wait doubles."""
_LONGEST_REST = 60.0
"""The longest wait before a core is replaced, in seconds."""
MOST_FAILURES = 6
"""An engine ends when each replica has failed this often in a row, the last time half a minute after the first."""

type StartReplica = Callable[[int], RemoteCore]
"""A function that begins to start the core of the replica with a number."""


class Replica:
    """One of several replicas, by its number. For one thread."""

    def __init__(self, index: int, start: StartReplica) -> None:
        self.index = index
        self._start = start
        self.core: RemoteCore | None = start(index)
        """The present core; None while a failed one is not replaced."""
        self.backlog: list[EngineCoreRequest] = []
        """The requests that wait for a core that starts."""
        self.stats: SchedulerStats | None = None
        """The core's last statistics; None before the first."""
        self.restart_at = 0.0
        """The time.monotonic() at which a failed core is replaced."""
        self.has_served = False
        """Whether a core of this replica has ever been ready."""
        self.drain_until: float | None = None
        """The time.monotonic() at which a draining replica ends its last requests; None if it does not drain."""
        self._num_failures = 0
        self._ready_at: float | None = None

    @property
    def is_running(self) -> bool:
        """Return whether the core takes requests."""
        return self._ready_at is not None

    @property
    def is_open(self) -> bool:
        """Return whether requests may be given to it, for now or for when its core has started."""
        return self.drain_until is None

    def poll_start(self) -> bool:
        """Return True, once, when a core that was starting is ready."""
        if self.core is None or self.is_running or not self.core.is_ready:
            return False
        self.core.wait_ready()
        self._ready_at, self.has_served = time.monotonic(), True
        return True

    @property
    def is_hopeful(self) -> bool:
        """Return whether a core runs or starts, or may soon."""
        return self.core is not None or self._num_failures < MOST_FAILURES

    def take_backlog(self) -> list[EngineCoreRequest]:
        """Remove and return the requests that wait for a core."""
        backlog, self.backlog = self.backlog, []
        return backlog

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request, with the core or until it has started.

        Raises VLLMValidationError if it is too large to be sent, EngineDeadError if the core has ended.
        """
        if self.core is not None and self.is_running:
            self.core.add_request(request)
        else:
            self.backlog.append(request)

    def abort(self, ids: list[str]) -> None:
        """End sequences. Raises EngineDeadError if the core has ended."""
        self.backlog = [each for each in self.backlog if set(ids).isdisjoint(sequence_ids(each))]
        if self.core is not None and self.is_running:
            self.core.abort_requests(ids)

    def bury(self) -> threading.Thread | None:
        """Give up the core; return the thread in which its process is waited for."""
        core, self.core, self._ready_at, self.stats = self.core, None, None, None
        if core is None or core.is_closed:
            return None
        core.begin_shutdown()
        thread = threading.Thread(target=core.finish_shutdown, name="jaxllm-replica-end", daemon=True)
        thread.start()
        return thread

    def rest(self) -> float:
        """Set the time at which a failed core is replaced, and return the seconds until then."""
        now = time.monotonic()
        if self._ready_at is not None and now - self._ready_at >= _STEADY_SECONDS:
            self._num_failures = 0
        seconds = min(_LONGEST_REST, 2.0 ** (self._num_failures - 1)) if self._num_failures else 0.0
        self._num_failures += 1
        self.restart_at = now + seconds
        return seconds

    def restart(self) -> None:
        """Start another core."""
        self.core = self._start(self.index)

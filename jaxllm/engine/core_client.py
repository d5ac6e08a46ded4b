"""A client is the one way to the engine core: the types of `messages` cross it, here within the process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from jaxllm.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats


class CoreClient(Protocol):
    """An engine core, wherever it runs."""

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest sequence, once the KV cache has its size."""
        ...

    def stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        ...

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        ...

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks at once; unknown ids are ignored."""
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks; unknown ids are ignored."""
        ...

    def step(self) -> EngineCoreOutputs:
        """Do one step; returns at once when there is nothing to do."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Say whether a step has something to do."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False when blocks are in use, unless running requests are to give theirs up."""
        ...

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        ...

    def shutdown(self) -> None:
        """Release the device; may be called twice."""
        ...


class InprocClient:
    """A client that calls an engine core in the same process and thread."""

    def __init__(self, core: CoreClient) -> None:
        self._core = core

    @property
    def max_model_len(self) -> int:
        """Return the length of the longest sequence, once the KV cache has its size."""
        return self._core.max_model_len

    def stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        return self._core.stats()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks at once; unknown ids are ignored."""
        self._core.abort_requests(list(request_ids))

    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks; unknown ids are ignored."""
        self._core.release(list(request_ids))

    def step(self) -> EngineCoreOutputs:
        """Do one step; returns at once when there is nothing to do."""
        return self._core.step()

    def has_unfinished_requests(self) -> bool:
        """Say whether a step has something to do."""
        return self._core.has_unfinished_requests()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False when blocks are in use, unless running requests are to give theirs up."""
        return self._core.reset_prefix_cache(reset_running_requests)

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        self._core.warm_up()

    def shutdown(self) -> None:
        """Release the device; may be called twice."""
        self._core.shutdown()

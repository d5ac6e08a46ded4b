"""The client of an engine core that runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxllm.core_messages import EngineCoreOutputs, EngineCoreRequest
from jaxllm.engine.transport.core_client import CoreClient, Programs, RunnableCore


class InprocClient(CoreClient):
    """A client that calls an engine core in the same process and thread."""

    def __init__(self, core: RunnableCore) -> None:
        self._core = core

    def programs(self) -> list[Programs]:
        """Return how far the core's programs are compiled."""
        return [Programs(self._core.num_compiled, self._core.is_warm)]

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; if the core refuses it, it ends with an output that gives the reason."""
        self._core.add_request(request)

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences and free their blocks at once; unknown ids are ignored."""
        self._core.abort_requests(list(sequence_ids))

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks; unknown ids are ignored."""
        self._core.release(list(sequence_ids))

    def step(self, *, wait: bool) -> EngineCoreOutputs | None:
        """Do one step, whether or not anyone waits for it; None if there is nothing to do."""
        del wait
        if not self._core.has_unfinished_requests():
            return None
        outputs = self._core.step()
        self._core.launch_ahead()  # the device has work while the caller handles the outputs
        return outputs

    def shutdown(self) -> None:
        """Release the device; may be called twice."""
        self._core.shutdown()

    def drop(self) -> None:
        """Release the device without waiting for what is being compiled."""
        self._core.drop()

    def get_weights(self) -> Any:
        """Return the weights, which the caller owns too from now on."""
        return self._core.get_weights()

    def _call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._core, method)(*arguments)

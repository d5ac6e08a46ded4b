"""The engine core: plan, run, commit. Token ids in, token ids out; it knows no text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxllm.engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

if TYPE_CHECKING:
    from jaxllm.execution.model_runner import ModelRunner, RunningStep
    from jaxllm.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs steps with one in flight: step N + 1 is planned and sent while the device computes step N."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, max_model_len: int, overlap: bool = True) -> None:
        self.max_model_len = max_model_len
        self._scheduler = scheduler
        self._runner: ModelRunner | None = runner
        """None once shut down."""
        self._overlap = overlap
        self._in_flight: RunningStep | None = None
        self._aborted: list[EngineCoreOutput] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises RuntimeError after `shutdown`."""
        if self._runner is None:
            raise RuntimeError("This engine was shut down: make a new one.")
        # The id is free again, though the end of the request that had it may not be reported yet.
        self._aborted = [output for output in self._aborted if output.request_id != request.request_id]
        self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks; the next `step` reports them."""
        self._aborted += self._scheduler.abort_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Say whether `step` has something to do or to report."""
        return self._scheduler.has_unfinished_requests() or self._in_flight is not None or bool(self._aborted)

    def step(self) -> EngineCoreOutputs:
        """Send the next step to the device, then wait for the one before and return what it did.

        If a step fails, the error is raised and all requests end with it; the engine itself goes on if the device does.
        """
        try:
            return self._step()
        except BaseException:
            self._in_flight = None
            self._aborted += self._scheduler.abandon()
            raise

    def _step(self) -> EngineCoreOutputs:
        finished, self._in_flight = self._in_flight, None
        launched = self._launch(finished)
        if self._overlap:
            self._in_flight = launched
        else:
            finished = launched
        outputs, self._aborted = self._aborted, []
        if finished is not None:
            outputs += self._scheduler.commit(finished.plan, finished.result())
        elif launched is None and self._scheduler.has_unfinished_requests():
            raise RuntimeError("the scheduler has requests and plans nothing: this is a bug in jaxllm")
        return EngineCoreOutputs(outputs=outputs, stats=self._scheduler.stats(), timestamp=time.monotonic())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        if self._runner is not None:
            self._runner.warm_up()

    def shutdown(self) -> None:
        """End all requests, stop background work, free parameters and KV cache. May be called twice."""
        if self._runner is None:
            return
        self._runner.shutdown()
        self._runner = self._in_flight = None
        self._aborted += self._scheduler.abandon()

    def _launch(self, before: RunningStep | None) -> RunningStep | None:
        if self._runner is None:
            return None
        plan = self._scheduler.plan((before.plan,) if before is not None else ())
        return None if plan is None else self._runner.run(plan)

"""The engine core plans, runs and commits steps: token ids go in, token ids come out; it knows no text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxllm.messages import BlockEviction, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, SchedulerStats

if TYPE_CHECKING:
    from jaxllm.constraints.token_masks import TokenMasks
    from jaxllm.execution.model_runner import ModelRunner, RunningStep
    from jaxllm.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

COMPILE_WAIT = 0.05  # seconds; how long an idle step waits for a grammar to compile, or for a late mask
MASK_WAIT = 0.05  # seconds; how long a step waits for masks before it goes on without the requests whose are late


class EngineCore:
    """The core runs steps with one in flight: step N + 1 is planned and sent while the device computes step N."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        masks: TokenMasks,
        *,
        max_model_len: int,
        overlap: bool = True,
    ) -> None:
        self.max_model_len = max_model_len
        self._scheduler = scheduler
        self._runner: ModelRunner | None = runner
        """It is None once the core is shut down."""
        self._masks = masks
        self._overlap = overlap
        self._in_flight: RunningStep | None = None
        self._compiling: dict[str, EngineCoreRequest] = {}
        """The requests whose grammar is being compiled, in order of arrival."""
        self._late: set[str] = set()
        """The requests that sat out the last plan because their masks were late."""
        self._ended: list[EngineCoreOutput] = []
        """The ends that came between steps, for the next one to report."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises RuntimeError after `shutdown`, ValueError for one that cannot run."""
        if self._runner is None:
            raise RuntimeError("This engine was shut down: make a new one.")
        # The id is free again, though the end of the request that had it may not be reported yet.
        self._ended = [output for output in self._ended if output.request_id != request.request_id]
        self._masks.add(request)
        if not self._masks.is_ready(request.request_id):
            self._compiling[request.request_id] = request
            return
        try:
            self._scheduler.add_request(request)
        except BaseException:
            self._masks.remove([request.request_id])
            raise

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks; the next `step` reports them."""
        ids = list(request_ids)
        self._ended += self._drop_compiling(ids)
        self._ended += self._scheduler.abort_requests(ids)
        self._masks.remove(ids)

    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks."""
        self._scheduler.release(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Say whether `step` has something to do or to report."""
        return bool(
            self._scheduler.has_unfinished_requests() or self._in_flight is not None or self._ended or self._compiling
        )

    def step(self) -> EngineCoreOutputs:
        """Send the next step to the device, then wait for the one before and return what it did.

        If a step fails, the error is raised and all requests end with it; the engine itself goes on if the device does.
        """
        try:
            return self._step()
        except BaseException:
            self._begin_anew()
            raise

    def _step(self) -> EngineCoreOutputs:
        self._admit_compiled()
        before, self._in_flight = self._in_flight, None
        if before is not None and self._scheduler.waits_for_commit():
            self._ended += self._commit(before)
            before, did_commit = None, True
        else:
            did_commit = before is not None
        launched = self._launch()
        if before is not None:
            self._ended += self._commit(before)
        if self._overlap:
            self._in_flight = launched
        elif launched is not None:
            self._ended += self._commit(launched)
        outputs, self._ended = self._ended, []
        if launched is None and not did_commit and not outputs:
            self._rest()
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.stats(),
            timestamp=time.monotonic(),
            evictions=self._take_evictions(),
            num_deferred_reqs=len(self._compiling),
        )

    def stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        return self._scheduler.stats()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes and return True; while requests hold blocks, do nothing and return False.

        With `reset_running_requests` they give their blocks up, and compute again what was in them.
        """
        if not reset_running_requests:
            return self._scheduler.reset_prefix_cache()
        in_flight, self._in_flight = self._in_flight, None
        try:
            if in_flight is not None:
                self._ended += self._commit(in_flight)
            return self._scheduler.reset_prefix_cache(preempt=True)
        except BaseException:
            self._begin_anew()
            raise

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
        self._abandon()

    def _take_evictions(self) -> list[BlockEviction]:
        residency = self._scheduler.cache.pool.residency
        return [] if residency is None else residency.take_evictions()

    def _launch(self) -> RunningStep | None:
        if self._runner is None:
            return None
        self._late = self._masks.late(MASK_WAIT)
        plan = self._scheduler.plan(self._late)
        if plan is None:
            return None
        row = self._masks.row
        masks = [row(chunk.request_id, chunk.num_output_tokens) if chunk.samples else None for chunk in plan.chunks]
        return self._runner.run(plan, masks)

    def _commit(self, step: RunningStep) -> list[EngineCoreOutput]:
        """Wait for a step and record it; requests that their masks have brought to an end get nothing of it."""
        outputs = self._end_masked()
        outputs += self._scheduler.commit(step.plan, step.result())
        for output in outputs:
            if output.finish_reason is not None:
                self._masks.remove([output.request_id])
            elif output.new_token_ids:
                self._masks.accept(output.request_id, output.new_token_ids)
        return outputs

    def _end_masked(self) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for request_id, reason in self._masks.dead_ends().items():
            outputs += self._scheduler.end(request_id, "error", reason)
        for request_id in self._masks.completed():
            outputs += self._scheduler.end(request_id, "stop")
        return outputs

    def _admit_compiled(self) -> None:
        """Hand over the requests whose grammars are ready; those that did not compile end."""
        failed = self._masks.dead_ends()
        for request_id in list(self._compiling):
            if request_id in failed:
                del self._compiling[request_id]
                self._masks.remove([request_id])
                self._ended.append(_ending(request_id, "error", failed[request_id]))
            elif self._masks.is_ready(request_id):
                self._admit(self._compiling.pop(request_id))

    def _admit(self, request: EngineCoreRequest) -> None:
        """Hand over a request within a step; one that the scheduler does not take ends alone."""
        try:
            self._scheduler.add_request(request)
        except Exception as error:
            logger.exception("request %s cannot be scheduled", request.request_id)
            self._masks.remove([request.request_id])
            self._ended.append(_ending(request.request_id, "error", f"{type(error).__name__}: {error}"))

    def _drop_compiling(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        dropped = [each for each in request_ids if self._compiling.pop(each, None) is not None]
        return [_ending(request_id, "abort") for request_id in dropped]

    def _rest(self) -> None:
        """Wait for a grammar or a mask where nothing could be planned; raise if that cannot be why."""
        if self._compiling or self._late:
            self._masks.wait(COMPILE_WAIT)
        elif self._scheduler.has_unfinished_requests():
            raise RuntimeError("the scheduler has requests and plans nothing: this is a bug in jaxllm")

    def _begin_anew(self) -> None:
        """End all requests after a failure that may have come anywhere in a step."""
        self._in_flight = None
        self._abandon()
        if self._runner is not None:
            self._runner.reset()

    def _abandon(self) -> None:
        self._ended += self._drop_compiling(list(self._compiling))
        ended = self._scheduler.abandon()
        self._ended += ended
        self._masks.remove([output.request_id for output in self._ended])


def _ending(request_id: str, finish_reason: str, stop_reason: str | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=[], finish_reason=finish_reason, stop_reason=stop_reason
    )

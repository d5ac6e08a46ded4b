"""The engine core plans, runs and commits steps: token ids go in, token ids come out."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from jaxllm.core_messages import (
    Alignment,
    BlockEviction,
    Clip,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestError,
    SchedulerStats,
    no_tokens,
    split,
)
from jaxllm.engine.core.hosts.host_group import Hosts, OneHost
from jaxllm.engine.core.profiler import StepProfiler
from jaxllm.engine.core.row_masks import rows_masks
from jaxllm.engine.core.weight_updates import HoldsWeights, WeightUpdates
from jaxllm.engine.transport.core_client import SLEEPING_PARTS
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.lora.store import AdapterStore, HoldsAdapters
from jaxllm.sampling_params import SamplingParams
from jaxllm.utils.freed_memory import give_back

if TYPE_CHECKING:
    from jaxllm.constraints.token_masks import TokenMasks
    from jaxllm.execution.model_runner import ModelRunner, Running
    from jaxllm.execution.tiers.mover import Mover
    from jaxllm.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

COMPILE_WAIT = 0.01  # seconds; how long an idle step waits for a grammar, an adapter, or a late mask
MASK_WAIT = 0.05  # seconds; the longest that a step waits for late masks, however long the step before it took
MASK_POLL = 0.0005  # seconds; how often it looks whether the step in flight has ended meanwhile


class EngineCore(HoldsAdapters, HoldsWeights):
    """Runs steps with one in flight: step N + 1 is planned and sent while the device computes step N.

    In the caller's thread there are two: step N + 1 is sent before the caller handles what step N - 1 gave.

    A request that it cannot take ends with an output that says why; no method raises for a bad request, but
    `check`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        masks: TokenMasks,
        *,
        overlap: bool = True,
        validators: Sequence[Callable[[SamplingParams], None]] = (),
        profiler: StepProfiler | None = None,
        adapters: AdapterStore | None = None,
        hosts: Hosts | None = None,
        mover: Mover | None = None,
        weights: WeightUpdates | None = None,
    ) -> None:
        """Let `validators`, which raise for params that they refuse, look at each request. `hosts` run the steps.

        `mover` moves blocks to the host and back, where the host keeps some; `weights` replaces the model's weights.
        """
        self._scheduler = scheduler
        self._runner: ModelRunner | None = runner
        """None once the core is shut down."""
        self._masks, self._adapters, self._hosts = masks, adapters, hosts or OneHost()
        self._mover, self._weights = mover, weights
        self._overlap = overlap
        self._validators = tuple(validators)
        self._profiler = profiler or StepProfiler(None)
        self._in_flight: Running | None = None
        self._ahead: Running | None = None
        """The step launched after that in flight, by `launch_ahead`."""
        self._failure: Exception | None = None
        """Why `launch_ahead` failed, for the next `step` to raise."""
        self._step_seconds = 0.0
        """The time that the last step took from its launch, or from the end of the one before it, to its result."""
        self._num_untimed = 0
        """The number of steps in flight whose time says nothing, because the host waited for a program meanwhile."""
        self._last_result = 0.0
        self.is_paused = False
        """Whether no more steps are to be done for now."""
        self._asleep: frozenset[str] = frozenset()
        """The parts, of SLEEPING_PARTS, that are not on the device."""
        self._live: set[str] = set()
        """The sequences whose end has not been reported."""
        self._preparing: dict[str, EngineCoreRequest] = {}
        """The sequences whose grammar is being compiled or whose adapter is being loaded, in order of arrival."""
        self._late: set[str] = set()
        """The sequences that sat out the last plan because their masks were late."""
        self._reports: list[EngineCoreOutput] = []
        """What the next call of `step` reports."""
        self._next_tokens = no_tokens()
        """The tokens that it reports beside them."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request's sequences; those of a bad one end with an error. Raises RuntimeError after `shutdown`."""
        if self._runner is None:
            raise RuntimeError("This engine was shut down: make a new one.")
        sequences = split(request)
        self._live.update(sequence.request_id for sequence in sequences)
        if self._asleep:  # one of several front ends may not know it yet
            self._refuse(sequences, RequestError("internal", "The engine sleeps."))
            return
        try:
            self._check_weights()
            if request.pooling_params is None:
                self._validate(request.sampling_params)
            if request.media is not None:
                self._runner.check_media(request.media)
            self._runner.check_clip(request.clip)
        except VLLMValidationError as error:
            self._refuse(sequences, RequestError.of(error))
            return
        for sequence in sequences:
            self._attempt(self._admit, sequence)

    def check(self, params: SamplingParams, seconds: float | None = None) -> None:
        """Raise VLLMValidationError for params that would be refused. A grammar that has not compiled after `seconds`
        passes, and every one with 0, so that time does not matter; None waits to its deadline.
        """
        self._validate(params)
        if params.structured_outputs is not None and seconds != 0:
            self._masks.check(params.structured_outputs, seconds)

    def fail(self, sequence_id: str, error: RequestError) -> None:
        """End a sequence with an error, whether or not the core has it; the next `step` reports it."""
        self._preparing.pop(sequence_id, None)
        self._reports += self._scheduler.end(sequence_id, "error", error) or [_ending(sequence_id, "error", error)]
        self._masks.remove([sequence_id])

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences and free their blocks; the next `step` reports them."""
        ids = list(sequence_ids)
        self._reports += [_ending(each, "abort") for each in ids if self._preparing.pop(each, None) is not None]
        self._reports += self._scheduler.abort_requests(ids)
        self._masks.remove(ids)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks."""
        self._scheduler.release(sequence_ids)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to do or to report."""
        return bool(self._live or self._in_flight is not None or self._reports or self._failure is not None)

    def step(self) -> EngineCoreOutputs:
        """Send the next step to the device, then wait for the one before and return what it did.

        If a step fails, the error is raised and all requests end with it; the engine itself goes on if the device does.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._profiler.before_step()
        try:
            with self._hosts.guard():
                return self._step()
        except BaseException as error:
            self._begin_anew(error)
            raise

    def _step(self) -> EngineCoreOutputs:
        self._admit_prepared()
        before, ahead, self._in_flight, self._ahead = self._in_flight, self._ahead, None, None
        if before is not None and ahead is None and self._scheduler.waits_for_commit():
            self._commit(before)
            before, did_commit = None, True
        else:
            did_commit = before is not None
        launched = self._launch(before) if ahead is None else ahead
        if before is not None:
            self._commit(before)
        if self._overlap:
            self._in_flight = launched
        elif launched is not None:
            self._commit(launched)
        if launched is None and not did_commit and not self._reports:
            self._rest()
        outputs, self._reports = self._reports, []
        next_tokens, self._next_tokens = self._next_tokens, no_tokens()
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        self._live.difference_update(ended)
        if self._adapters is not None:
            self._adapters.release(ended)
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.stats(),
            timestamp=time.monotonic(),
            evictions=self._take_evictions(),
            num_deferred_reqs=len(self._preparing),
            next_tokens=next_tokens,
        )

    def launch_ahead(self) -> None:
        """Send the step after the one in flight, for a caller that has work to do before it calls `step` again.

        It does nothing if a step has to wait for the one before it. If it fails, all requests end as in `step`; the
        error is left to the next `step`, since the caller has outputs to handle.
        """
        if not self._overlap or self._in_flight is None or self._scheduler.waits_for_commit() or self._masks.late():
            return
        try:
            with self._hosts.guard():
                self._ahead = self._launch(self._in_flight)
        except BaseException as error:
            self._begin_anew(error)
            if not isinstance(error, Exception):
                raise
            self._failure = error

    def stats(self) -> SchedulerStats:
        """Return the scheduler's statistics, with those of the tiers."""
        stats = self._scheduler.stats()
        if self._mover is None:
            return stats
        return msgspec.structs.replace(stats, tiers=self._mover.stats(self._scheduler.tiers))

    @property
    def is_compiling(self) -> bool:
        """Return, to any thread, whether a step waits for its program to be compiled, which may take minutes."""
        runner = self._runner
        return runner is not None and runner.is_compiling

    @property
    def is_warm(self) -> bool:
        """Return, to any thread, whether every program is compiled; before, a step may have to wait for one."""
        runner = self._runner
        return runner is not None and runner.is_warm

    @property
    def num_compiled(self) -> int:
        """Return, to any thread, the number of programs compiled since the start, without those found on disk."""
        runner = self._runner
        return 0 if runner is None else runner.num_compiled

    def num_computed_tokens(self, sequence_id: str) -> int:
        """Return the number of a sequence's computed tokens; 0 unless it runs."""
        return self._scheduler.num_computed_tokens(sequence_id)

    def align(self, clip: Clip, prompt_ids: list[int], token_ids: list[int]) -> Alignment:
        """Return where a transcript's tokens are in a clip, and their log-probabilities, see `Core.align`."""
        runner = self._runner
        if runner is None:
            raise EngineDeadError("The engine was shut down: make a new one.")
        heard_tf, logprobs_t = runner.align(clip, prompt_ids, token_ids)
        return Alignment(heard_tf.tobytes(), logprobs_t.tolist())

    def reset_encoder_cache(self) -> bool:
        """Forget all that is encoded and return True; do nothing and return False while some of it is needed."""
        return self._scheduler.clips.forget_all() and self._scheduler.media.forget_all()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes and return True; while requests hold blocks, do nothing and return False.

        With `reset_running_requests` they give their blocks up, and compute again what was in them. With
        `reset_connector` what the host keeps is forgotten too.
        """
        if not reset_running_requests:
            return self._scheduler.reset_prefix_cache(with_host=reset_connector)
        in_flight, self._in_flight, self._ahead = (self._in_flight, self._ahead), None, None
        try:
            with self._hosts.guard():
                for step in in_flight:
                    if step is not None:
                        self._commit(step)
                        self._report_tokens()
            return self._scheduler.reset_prefix_cache(preempt=True, with_host=reset_connector)
        except BaseException as error:
            self._begin_anew(error)
            raise

    def set_paused(self, is_paused: bool) -> None:
        """Let requests stay as they are from now on, or go on."""
        self.is_paused = is_paused

    def sleep(self, level: int) -> None:
        """Free weights and caches, and forget all that is cached, until `wake_up`.

        At level 1 the host keeps the weights, unless the device is the host; at level 2 they are read again. A core
        that sleeps goes on sleeping. Raises VLLMValidationError while a request is unfinished.
        """
        runner = self._runner
        if runner is None:
            raise RuntimeError("This engine was shut down: make a new one.")
        if self._asleep:
            return
        if self._preparing or self._scheduler.has_unfinished_requests():
            raise VLLMValidationError("requests are unfinished: run them to their end, or abort them, before sleep().")
        while self.has_unfinished_requests():  # what is left of requests that have ended
            self.step()
        self._forget_caches()
        runner.release_device(keeps_weights=level == 1)
        self._asleep = frozenset(SLEEPING_PARTS)
        gc.collect()  # a CPU's weights are memory of numpy arrays, which cycles of references keep
        give_back()

    def wake_up(self, tags: list[str]) -> None:
        """Put the parts of SLEEPING_PARTS that `tags` names on the device again, unless they are there.

        What fails, as for lack of memory, is raised, and those parts stay asleep.
        """
        runner = self._runner
        if runner is None:
            raise RuntimeError("This engine was shut down: make a new one.")
        wake = {"weights": runner.bring_weights, "kv_cache": runner.make_caches}
        for part in SLEEPING_PARTS:
            if part in self._asleep and part in tags:
                wake[part]()
                self._asleep -= {part}
                if part == "weights" and self._mover is not None and not self._mover.are_files_right():
                    self._leave_files()
        self._look_at_weights()

    def finish_weight_update(self, version: str | int | None = None) -> None:
        """Put new weights in place; running requests compute again, with these, what they have.

        Prefixes and encoded media are forgotten, and a folder of KV blocks is left alone from now on: its blocks are of
        other weights. Raises VLLMValidationError, and changes nothing, for an update that is not complete.
        """
        updates = self._get_weights()
        updates.check()
        self._leave_files()
        if not (self.reset_prefix_cache(True, reset_connector=True) and self.reset_encoder_cache()):
            raise RuntimeError("no request runs, but blocks or media are held: this is a bug in jaxllm")
        if self._mover is not None:
            self._mover.begin(self._scheduler.tiers.take_moves())
            self._mover.finish(self._scheduler.tiers)
        updates.finish(version)
        self._asleep -= {"weights"}

    def _leave_files(self) -> None:
        """Use a folder of KV blocks no more: its blocks are of other weights."""
        self._scheduler.leave_files()
        if self._mover is not None:
            self._mover.files = None

    def _forget_caches(self) -> None:
        """Forget prefixes, here and on the host, encoded media and the adapters in slots; no request needs any.

        Files stay: they are of weights that come back.
        """
        is_reset = self._scheduler.reset_prefix_cache(with_host=True, with_files=False)
        if not (is_reset and self.reset_encoder_cache()):
            raise RuntimeError("no request is left, but blocks are held: this is a bug in jaxllm")
        if self._mover is not None:
            self._mover.begin(self._scheduler.tiers.take_moves())
            self._mover.finish(self._scheduler.tiers)
        self._scheduler.adapters.forget_idle()

    def start_profile(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Record what host and devices do until `stop_profile`; None takes profiler_config's value."""
        self._profiler.start(prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        self._profiler.stop()

    def warm_up(self) -> None:
        """Wait until every program is compiled. For any thread: steps go on meanwhile."""
        if (runner := self._runner) is not None:
            runner.warm_up()

    def shutdown(self) -> None:
        """End all requests, stop background work, free parameters and KV cache. May be called twice."""
        runner = self._runner
        self.drop()
        if runner is not None:
            runner.shutdown()
        del runner
        give_back()

    def drop(self) -> None:
        """Do as `shutdown` does, but do not wait for what is being compiled."""
        if self._runner is None:
            return
        try:
            self._profiler.close()
        finally:
            if self._mover is not None:
                self._mover.close(self._scheduler.tiers)
            self._runner.begin_shutdown()
            if self._adapters is not None:
                self._adapters.close()
            self._runner = self._in_flight = self._ahead = self._failure = None
            self._weights = None
            self._abandon(RequestError("internal", "The engine was shut down."))
            self._hosts.close()
            give_back()

    def _validate(self, params: SamplingParams) -> None:
        for validate in self._validators:
            validate(params)

    def _take_evictions(self) -> list[BlockEviction]:
        residency = self._scheduler.cache.groups[0].pool.residency
        return [] if residency is None else residency.take_evictions()

    def _launch(self, before: Running | None) -> Running | None:
        """Send the next step; `before` is the one in flight, if any."""
        if self._runner is None:
            return None
        self._late = self._late_masks(before)
        if before is None:
            self._guess()
        if self._mover is not None:
            self._mover.end(self._scheduler.tiers)
        plan = self._scheduler.plan(self._late, self._masks.cut_drafts)
        if self._mover is not None:
            self._mover.begin(self._scheduler.tiers.take_moves())
        if plan is None:
            return None
        masks = rows_masks(plan, self._masks)
        if before is None:
            self._last_result = time.monotonic()
        for slot, number in plan.adapter_loads.items():
            assert self._adapters is not None
            self._runner.set_adapter(slot, self._adapters.arrays(number))
        num_awaited = self._runner.num_awaited
        launched = self._runner.run(plan, masks)
        if self._runner.num_awaited > num_awaited:
            self._num_untimed = 1 if before is None else 2
        return launched

    def _guess(self) -> None:
        """Let the draft model, if there is one, guess what running requests say next, if that pays."""
        plan = self._scheduler.plan_guesses()
        if plan is not None and self._runner is not None:
            started = time.monotonic()
            sampled = self._runner.guess(plan.steps)
            self._scheduler.take_guesses(plan, sampled, time.monotonic() - started)

    def _late_masks(self, before: Running | None) -> set[str]:
        """Wait for masks and return the sequences with late ones.

        The others are not held up for it: the wait ends with the step in flight, or without one after as long as the
        last step took.
        """
        late = self._masks.late()
        deadline = time.monotonic() + min(MASK_WAIT, self._step_seconds)
        while late and (not before.is_done() if before is not None else time.monotonic() < deadline):
            self._masks.wait(MASK_POLL)
            late = self._masks.late()
        return late

    def _commit(self, step: Running) -> None:
        """Wait for a step, record it and report what it gave.

        Sequences that their masks have brought to an end get nothing of it.
        """
        self._reports += self._end_masked()
        result = step.result()
        now = time.monotonic()
        self._step_seconds, self._last_result = now - self._last_result, now
        seconds = 0.0 if self._num_untimed else self._step_seconds
        self._num_untimed = max(0, self._num_untimed - 1)
        outputs, self._next_tokens = self._scheduler.commit(step.plan, replace(result, seconds=seconds))
        self._reports += outputs
        if self._masks.is_empty:
            return
        for output in outputs:
            if output.finish_reason is not None:
                self._masks.remove([output.request_id])
            elif output.new_token_ids:
                self._masks.accept(output.request_id, output.new_token_ids)
        for sequence_id, token_id in zip(*self._next_tokens, strict=True):
            self._masks.accept(sequence_id, [token_id])

    def _report_tokens(self) -> None:
        """Report the tokens so far before what is reported from now on."""
        self._reports += self._next_tokens.outputs()
        self._next_tokens = no_tokens()

    def _end_masked(self) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for sequence_id, error in self._masks.dead_ends().items():
            outputs += self._scheduler.end(sequence_id, "error", error)
        for sequence_id in self._masks.completed():
            outputs += self._scheduler.end(sequence_id, "stop")
        return outputs

    def _admit_prepared(self) -> None:
        """Schedule the sequences with ready grammars and adapters; end those with bad ones."""
        if not self._preparing:
            return
        failed = self._masks.dead_ends()
        for sequence_id in list(self._preparing):
            has_adapter = self._adapters is None or self._adapters.is_ready(sequence_id)
            reason = failed.get(sequence_id)
            if reason is None and has_adapter and self._adapters is not None:
                error = self._adapters.error(sequence_id)
                reason = None if error is None else RequestError.of(error)
            if reason is not None:
                self._refuse([self._preparing.pop(sequence_id)], reason)
            elif has_adapter and self._masks.is_ready(sequence_id):
                self._attempt(self._schedule, self._preparing.pop(sequence_id))

    def _attempt(self, action: Callable[[EngineCoreRequest], None], sequence: EngineCoreRequest) -> None:
        """Call `action` with a sequence; an error ends that sequence alone."""
        try:
            action(sequence)
        except VLLMValidationError as error:
            self._refuse([sequence], RequestError.of(error))
        except Exception as error:
            logger.exception("request %s cannot be taken on", sequence.request_id)
            self._refuse([sequence], RequestError.of(error))

    def _admit(self, sequence: EngineCoreRequest) -> None:
        """Schedule a sequence, once its grammar has compiled and its adapter is loaded, if it has them."""
        self._masks.add(sequence)
        if sequence.lora is not None:
            assert self._adapters is not None, "a front end lets no adapters through without enable_lora"
            self._adapters.ask(sequence.request_id, sequence.lora)
        if sequence.lora is None and self._masks.is_ready(sequence.request_id):
            self._schedule(sequence)
        else:
            self._preparing[sequence.request_id] = sequence

    def _schedule(self, sequence: EngineCoreRequest) -> None:
        if self._adapters is not None and sequence.lora is not None:
            number = self._adapters.number_of(sequence.request_id)
            sequence = msgspec.structs.replace(sequence, adapter=number)
        self._scheduler.add_request(sequence)
        if self._validators or sequence.sampling_params.structured_outputs is not None:  # else nobody waits for it
            self._reports.append(EngineCoreOutput(request_id=sequence.request_id, is_admitted=True))

    def _refuse(self, sequences: Iterable[EngineCoreRequest], error: RequestError) -> None:
        ids = [sequence.request_id for sequence in sequences]
        self._masks.remove(ids)
        self._reports += [_ending(each, "error", error) for each in ids]

    def _rest(self) -> None:
        """Wait for a grammar or a mask where nothing could be planned; raise if nothing is waited for."""
        if self._adapters is not None and any(each.lora is not None for each in self._preparing.values()):
            self._adapters.wait(COMPILE_WAIT)
        elif self._preparing or self._late:
            self._masks.wait(COMPILE_WAIT)
        elif self._mover is not None and self._scheduler.tiers.is_fetching:
            self._mover.wait(COMPILE_WAIT)
        elif self._scheduler.has_unfinished_requests():
            raise RuntimeError("the scheduler has requests and plans nothing: this is a bug in jaxllm")
        elif self._live:
            lost = len(self._live)
            raise RuntimeError(f"The scheduler has lost {lost} requests: none is queued, and they never ended.")

    def _begin_anew(self, cause: BaseException) -> None:
        """End all requests after a failure that may have come anywhere in a step."""
        self._in_flight = self._ahead = None
        self._report_tokens()
        self._abandon(RequestError("internal", f"A step failed: {type(cause).__name__}: {cause}"))
        if self._mover is not None:
            self._mover.reset()
        if self._runner is not None and self._hosts.can_go_on:
            self._runner.reset()

    def _abandon(self, error: RequestError) -> None:
        self._reports += self._scheduler.abandon(error)
        reported = {output.request_id for output in self._reports if output.finish_reason is not None}
        # Those whose grammars compile, and those that the scheduler has lost.
        self._reports += [_ending(each, "error", error) for each in sorted(self._live - reported)]
        self._preparing.clear()
        self._masks.remove(self._live)


def _ending(sequence_id: str, finish_reason: str, error: RequestError | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=sequence_id, finish_reason=finish_reason, error=error)

"""Relay between front ends and the core, or its replicas: requests one way, each front end's outputs the other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from jaxllm.core_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    NextTokens,
    RequestError,
    no_tokens,
    sequence_ids,
)
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.front.front_metrics import FrontMetrics
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.wire import Abort, Add, Call, FrameError, Release, Reply
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.processes.front_process import FrontProcess

_FORGETTING = ("sleep", "finish_weight_update")
"""The calls after which no prefix is cached."""


class _Sequence:
    """A sequence that has not ended, and its front end."""

    __slots__ = ("front", "num_prompt_tokens")

    def __init__(self, front: FrontProcess, request: EngineCoreRequest) -> None:
        self.front = front
        self.num_prompt_tokens = len(request.prompt_token_ids)
        """The tokens of its prompt; 0 once its first output has come."""


class Relay:
    """Routes by the ids of sequences, which are unique among all front ends. For one thread.

    What a core raises as EngineDeadError is raised.
    """

    def __init__(self, remote: RemoteClient, ready: EngineReady) -> None:
        self._remote = remote
        self.metrics = FrontMetrics(ready)
        """What the cores and their steps count."""
        self._sequences: dict[str, _Sequence] = {}
        self._calls: dict[int, tuple[FrontProcess, Call]] = {}
        """The calls that the core has not answered, by the core's ids."""
        self._steps: dict[int, EngineCoreOutputs] = {}
        """The last step of each replica, without its outputs."""

    # -- From a front end -----------------------------------------------------------------------------------------

    def take(self, front: FrontProcess, message: Add | Abort | Release | Call | FrameError) -> None:
        """Pass a front end's message on to the core."""
        match message:
            case Add(request):
                self._add(front, request)
            case Abort(ids):
                self._remote.abort_requests(self._forget(ids))
            case Release(ids):
                front.kept.difference_update(ids)
                self._remote.release(ids)
            case Call(_, method, arguments):
                self._calls[self._remote.begin_call(method, *arguments)] = front, message
            case FrameError(request_id=request_id):
                if request_id:
                    problem = RequestError("internal", f"The request could not be read: {message}")
                    self._send_outputs(front, [_failed(request_id, problem)])

    def lose(self, front: FrontProcess) -> None:
        """End in the core all that a front end that has gone has asked for."""
        self._end(front)
        for call_id in [call_id for call_id, (caller, _) in self._calls.items() if caller is front]:
            del self._calls[call_id]
            self._remote.drop_reply(call_id)
        if front.kept:
            self._remote.release(list(front.kept))
            front.kept.clear()

    def _add(self, front: FrontProcess, request: EngineCoreRequest) -> None:
        for sequence_id in front.add(request):
            self._sequences[sequence_id] = _Sequence(front, request)
        try:
            self._remote.add_request(request)
        except VLLMValidationError as error:
            self._forget(ids := sequence_ids(request))
            front.kept.discard(request.request_id)
            self._send_outputs(front, [_failed(each, RequestError.of(error)) for each in ids])

    def _end(self, front: FrontProcess) -> list[str]:
        """End a front end's sequences in the core, and return them."""
        ids = self._forget(list(front.sequences))
        if ids:
            self._remote.abort_requests(ids)
        return ids

    def _forget(self, ids: Iterable[str]) -> list[str]:
        """Forget sequences and return those that were known."""
        known = [each for each in ids if each in self._sequences]
        for sequence_id in known:
            self._sequences.pop(sequence_id).front.sequences.discard(sequence_id)
        return known

    # -- From the core --------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Pass on all that has come from the core."""
        is_more = True
        while is_more:
            is_more = self._remote.receive()
            self.pass_on()

    def pass_on(self) -> None:
        """Pass on outputs and answers that the core's client has taken in."""
        while True:
            try:
                step = self._remote.take_outputs()
            except FrameError as error:
                self._fail_all(f"An outcome of the engine core cannot be read, and nobody knows whose it was: {error}")
                continue
            if step is None:
                break
            self._pass_step(step)
        for call_id, (front, call) in list(self._calls.items()):
            reply = self._remote.take_reply(call_id)
            if reply is not None:
                del self._calls[call_id]
                if (call.method == "reset_prefix_cache" and reply.value) or call.method in _FORGETTING:
                    self.metrics.forget_hits()
                front.send(Reply(call.call_id, reply.value, reply.error))

    def show_load(self, fronts: Iterable[FrontProcess]) -> None:
        """Show front ends the last step of each replica, also those that had no part in it."""
        for step in self._steps.values():
            for front in fronts:
                front.send(step)

    def _pass_step(self, step: EngineCoreOutputs) -> None:
        parts: dict[FrontProcess, list[EngineCoreOutput]] = {}
        num_tokens, metrics = 0, self.metrics.of(step.engine_index)
        for output in step.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            if sequence.num_prompt_tokens and (output.new_token_ids or output.pooled is not None):
                metrics.on_first_token(0.0, sequence.num_prompt_tokens, output.num_cached_tokens)
                sequence.num_prompt_tokens = 0
            num_tokens += len(output.new_token_ids)
            parts.setdefault(sequence.front, []).append(output)
            if output.finish_reason is not None:
                self._forget((output.request_id,))
        next_parts: dict[FrontProcess, NextTokens] = {}
        for sequence_id, token_id in zip(*step.next_tokens, strict=True):
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                num_tokens += 1
                part = next_parts.setdefault(sequence.front, no_tokens())
                part.sequence_ids.append(sequence_id)
                part.token_ids.append(token_id)
        metrics.on_evictions(step.evictions)
        metrics.on_step(step.stats, num_tokens, step.num_deferred_reqs)
        self.metrics.on_step(step.engine_index, step.timestamp, step.timestamp)
        empty = msgspec.structs.replace(step, outputs=[], evictions=[], next_tokens=no_tokens())
        self._steps[step.engine_index] = empty
        for front in dict.fromkeys((*parts, *next_parts)):
            of_front = parts.get(front, []), next_parts.get(front, no_tokens())
            front.send(msgspec.structs.replace(empty, outputs=of_front[0], next_tokens=of_front[1]))

    def _fail_all(self, problem: str) -> None:
        """End all requests: it is unknown which outputs are lost."""
        for front in {sequence.front for sequence in self._sequences.values()}:
            error = RequestError("internal", problem)
            self._send_outputs(front, [_failed(each, error) for each in self._end(front)])

    def _send_outputs(self, front: FrontProcess, outputs: Sequence[EngineCoreOutput]) -> None:
        stats = self.metrics.of(0).stats
        front.send(EngineCoreOutputs(outputs=list(outputs), stats=stats, timestamp=time.monotonic()))


def _failed(sequence_id: str, error: RequestError) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=sequence_id, finish_reason="error", error=error)

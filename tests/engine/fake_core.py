"""A core without a model: each sequence's tokens come from a script. Its client sends everything as frames."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.core_messages import (
    Alignment,
    Clip,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestError,
    SchedulerStats,
    TokenLogprobs,
    no_tokens,
    split,
)
from jaxllm.engine.client.remote_client import result
from jaxllm.engine.core.core_loop import CoreLoop
from jaxllm.engine.core.profiler import StepProfiler
from jaxllm.engine.transport.core_client import CoreClient, Programs, RunnableCore
from jaxllm.engine.transport.wire import (
    Abort,
    Add,
    Call,
    FrameError,
    FromCore,
    Heartbeat,
    Release,
    Reply,
    ToCore,
    decode_from_core,
    decode_to_core,
    encode_from_core,
    encode_to_core,
)
from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.store import AdapterStore, HoldsAdapters
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.constraints.compiler import GrammarCompiler

type Script = Callable[[EngineCoreRequest], list[int]]


class FakeCore(HoldsAdapters):
    """Gives one token per sequence and step; treats EOS, stop ids and max_tokens as the scheduler does."""

    def __init__(
        self,
        script: Script,
        *,
        max_model_len: int = 128,
        vocab_size: int = 1000,
        running: int = 64,
        grammars: GrammarCompiler | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        """Check structured outputs with `grammars`; without, nothing is refused."""
        self._adapters = AdapterStore(lambda request: request.lora_name, 64)
        self.max_model_len = max_model_len
        self.requests: dict[str, EngineCoreRequest] = {}
        """The sequences that have not ended."""
        self.seen: list[EngineCoreRequest] = []
        """All sequences that ever came."""
        self.aborted: list[str] = []
        self.parked: set[str] = set()
        """Sequences that have ended, and whose blocks are kept."""
        self.num_steps = self.num_tokens = self.num_resets = self.num_shutdowns = self.num_blocks_in_use = 0
        self.weight_version: str | int = "default"
        self.slept: list[int] = []
        """The levels of all calls of `sleep`."""
        self.woken: list[str] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self.is_compiling, self.is_warm, self.num_compiled, self.is_paused = False, True, 0, False
        self._script = script
        self._vocab_size = vocab_size
        self._running = running
        self._grammars = grammars
        self._profiler = profiler or StepProfiler(None)
        self._outputs: dict[str, list[int]] = {}
        self._entered: dict[str, float] = {}
        self._failed: list[EngineCoreOutput] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        assert request.max_tokens >= 1
        assert len(request.prompt_token_ids) + request.max_tokens <= self.max_model_len
        for sequence in split(request):
            assert sequence.request_id not in self.requests
            self.requests[sequence.request_id] = sequence
            self.seen.append(sequence)
            self._outputs[sequence.request_id] = []
            self._entered[sequence.request_id] = time.monotonic()

    def check(self, params: SamplingParams, seconds: float | None = None) -> None:
        if self._grammars is not None and params.structured_outputs is not None and seconds != 0:
            self._grammars.check(params.structured_outputs, seconds)

    def fail(self, sequence_id: str, error: RequestError) -> None:
        self.requests.pop(sequence_id, None)
        self._failed.append(EngineCoreOutput(request_id=sequence_id, finish_reason="error", error=error))

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            if self.requests.pop(sequence_id, None) is not None:
                self.aborted.append(sequence_id)

    def align(self, clip: Clip, prompt_ids: list[int], token_ids: list[int]) -> Alignment:
        del clip, prompt_ids, token_ids
        raise VLLMValidationError("there is no model to align transcripts.", parameter="clip")

    def reset_encoder_cache(self) -> bool:
        return True

    def release(self, sequence_ids: Iterable[str]) -> None:
        self.parked.difference_update(sequence_ids)

    def step(self) -> EngineCoreOutputs:
        self._profiler.before_step()
        self.before_step(self.num_steps)
        self.num_steps += 1
        rows = list(self.requests.values())[: self._running]
        failed, self._failed = self._failed, []
        outputs, next_tokens = failed, no_tokens()
        for output in map(self._advance, rows):
            num_tokens = len(self._outputs[output.request_id])
            if num_tokens == 1 or num_tokens % 2 == 0 or output.finish_reason or output.new_logprobs is not None:
                outputs.append(output)
            else:
                next_tokens.sequence_ids.append(output.request_id)
                next_tokens.token_ids.extend(output.new_token_ids)
        self.num_tokens += len(rows)
        self.num_blocks_in_use = len(rows)
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.stats(),
            timestamp=time.monotonic(),
            num_deferred_reqs=5,
            next_tokens=next_tokens,
        )

    def launch_ahead(self) -> None:
        """Do nothing: there is no device."""

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running_reqs=min(self._running, len(self.requests)),
            num_waiting_reqs=max(0, len(self.requests) - self._running),
            num_blocks=101,
            num_blocks_in_use=self.num_blocks_in_use,
            num_preemptions=0,
            prefix_cache_requests=1,
            prefix_cache_queries=8,
            prefix_cache_hits=2,
            num_steps=self.num_steps,
            num_scheduled_tokens=self.num_tokens,
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests or self._failed)

    def num_computed_tokens(self, sequence_id: str) -> int:
        del sequence_id
        return 0

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.num_resets += 1
        return reset_running_requests or not self.requests

    def sleep(self, level: int) -> None:
        self.slept.append(level)

    def wake_up(self, tags: list[str]) -> None:
        self.woken += tags

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def start_weight_update(self, of_draft: bool = False) -> None:
        """Raise VLLMValidationError: there are no weights."""
        raise VLLMValidationError("there are no weights to update.", parameter="weights")

    def update_weights(self, weights: Any) -> None:
        """Raise VLLMValidationError: there are no weights."""
        self.start_weight_update()

    def finish_weight_update(self, version: str | int | None = None) -> None:
        """Raise VLLMValidationError: there are no weights."""
        self.start_weight_update()

    def is_updating_weights(self) -> bool:
        """Return False: no update can have begun."""
        return False

    def drop_weight_update(self) -> None:
        """Do nothing: no update can have begun."""

    def get_weights(self) -> Any:
        """Raise VLLMValidationError: there are no weights."""
        self.start_weight_update()

    def set_weight_version(self, version: str | int) -> None:
        """Set the version that `get_weight_version` returns."""
        self.weight_version = version

    def get_weight_version(self) -> str | int:
        """Return the version of weights that are not there."""
        return self.weight_version

    def warm_up(self) -> None:
        """Do nothing: there is nothing to compile."""

    def start_profile(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        self._profiler.start(prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> None:
        self._profiler.stop()

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self._profiler.close()

    def drop(self) -> None:
        self.shutdown()

    def _advance(self, request: EngineCoreRequest) -> EngineCoreOutput:
        out = self._outputs[request.request_id]
        token_id = self._script(request)[len(out)]
        out.append(token_id)
        params = request.sampling_params
        reason, stop_reason = None, None
        if token_id == request.eos_token_id:
            reason = "stop"
        elif token_id in (params.stop_token_ids or ()):
            reason, stop_reason = "stop", token_id
        elif len(out) == request.max_tokens:
            reason = "length"
        if reason is not None:
            del self.requests[request.request_id]
            if request.keeps_blocks:
                self.parked.add(request.request_id)
        entered = self._entered[request.request_id]
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token_id],
            new_logprobs=None
            if params.num_logprobs is None
            else [self._logprobs(token_id, params.num_logprobs, params.logprob_token_ids or [])],
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=3,
            num_preemptions=len(out) // 2,
            queued_ts=entered,
            scheduled_ts=entered,
        )

    def _logprobs(self, token_id: int, k: int, asked_ids: list[int]) -> TokenLogprobs:
        """Make the sampled token the most likely one if its id is even, else the fifth, at -5; ids asked for at -id."""
        num = 0 if asked_ids else self._vocab_size if k < 0 else k
        others = [each for each in range(self._vocab_size) if each != token_id]
        top = [token_id, *others] if token_id % 2 == 0 else [*others[:4], token_id, *others[4:]]
        rank = 1 if token_id % 2 == 0 else 5
        values = [-float(rank), *(-1.0 - i for i in range(num)), *(-float(each) for each in asked_ids)]
        return TokenLogprobs([token_id, *top[:num], *asked_ids], values, rank)


class FrameInbox:
    """An inbox of frames that is not filled while its owner waits."""

    def __init__(self) -> None:
        self.frames: deque[list[bytes | memoryview]] = deque()

    def put(self, message: ToCore) -> None:
        frames = encode_to_core(message)
        assert decode_to_core(frames) == message
        self.frames.append(frames)

    def receive(self, *, wait: bool) -> list[ToCore | FrameError]:
        assert self.frames or not wait, "the core would wait for ever"
        messages: list[ToCore | FrameError] = []
        while self.frames:
            try:
                messages.append(decode_to_core(self.frames.popleft()))
            except FrameError as error:
                messages.append(error)
        return messages


class FrameOutbox:
    """An outbox that keeps frames until somebody takes them."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()

    def send(self, message: FromCore) -> None:
        frame = encode_from_core(message)
        assert decode_from_core(frame) == message
        self.frames.append(frame)

    def take(self) -> FromCore:
        return decode_from_core(self.frames.popleft())


class BytesClient(CoreClient):
    """Runs a core's loop by hand: every message crosses it as frames, typed both ways, as between two processes."""

    def __init__(self, core: RunnableCore) -> None:
        self._core = core
        self._inbox, self._outbox = FrameInbox(), FrameOutbox()
        self._loop = CoreLoop(core, self._inbox, self._outbox)

    def programs(self) -> list[Programs]:
        self._outbox.send(self._loop.heartbeat())
        beat = decode_from_core(self._outbox.frames.pop())
        assert isinstance(beat, Heartbeat)
        return [Programs(beat.num_compiled, beat.is_warm)]

    def add_request(self, request: EngineCoreRequest) -> None:
        self._tell(Add(request))

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        self._tell(Abort(list(sequence_ids)))

    def release(self, sequence_ids: Iterable[str]) -> None:
        self._tell(Release(list(sequence_ids)))

    def step(self, *, wait: bool) -> EngineCoreOutputs | None:
        if not self._outbox.frames:
            if not self._core.has_unfinished_requests():
                return None
            self._loop._post(self._core.step())
        outputs = self._outbox.take()
        assert isinstance(outputs, EngineCoreOutputs)
        return outputs

    def shutdown(self) -> None:
        self._core.shutdown()

    def drop(self) -> None:
        self._core.drop()

    def _tell(self, message: ToCore) -> None:
        self._inbox.put(message)
        assert self._loop._drain()

    def _call(self, method: str, *arguments: Any) -> Any:
        self._tell(Call(7, method, [msgspec.to_builtins(each) for each in arguments]))
        for thread in threading.enumerate():
            if thread.name in ("jaxllm-warm-up", "jaxllm-wake_up"):
                thread.join()
        reply = decode_from_core(self._outbox.frames.pop())
        assert isinstance(reply, Reply)
        assert reply.call_id == 7
        return result(reply)


def hashed_tokens(request: EngineCoreRequest, low: int = 300, high: int = 330) -> list[int]:
    """Return tokens that depend on the prompt, and on the seed unless the request is greedy."""
    seed = request.seed if request.sampling_params.temperature else 0
    tokens: list[int] = []
    for position in range(request.max_tokens):
        digest = hashlib.sha256(repr((request.prompt_token_ids, seed, position)).encode()).digest()
        tokens.append(low + digest[0] % (high - low))
    return tokens

"""A fake core has no model: each request's tokens come from a script. Its client sends everything as bytes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

import msgspec

from jaxllm.engine.core_client import CoreClient
from jaxllm.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    TokenLogprobs,
)

type Script = Callable[[EngineCoreRequest], list[int]]


class FakeCore:
    """Gives one token per request and step; treats EOS, stop ids and max_tokens as the scheduler does."""

    def __init__(self, script: Script, *, max_model_len: int = 128, vocab_size: int = 1000, running: int = 64) -> None:
        self.max_model_len = max_model_len
        self.requests: dict[str, EngineCoreRequest] = {}
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.parked: set[str] = set()
        """Requests that have ended, and whose blocks are kept."""
        self.num_steps = self.num_tokens = self.num_resets = self.num_shutdowns = self.num_blocks_in_use = 0
        self.before_step: Callable[[int], None] = lambda step: None
        self._script = script
        self._vocab_size = vocab_size
        self._running = running
        self._outputs: dict[str, list[int]] = {}
        self._entered: dict[str, float] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        assert request.request_id not in self.requests
        assert request.max_tokens >= 1
        assert len(request.prompt_token_ids) + request.max_tokens <= self.max_model_len
        self.requests[request.request_id] = request
        self.seen.append(request)
        self._outputs[request.request_id] = []
        self._entered[request.request_id] = time.monotonic()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.requests.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def release(self, request_ids: Iterable[str]) -> None:
        self.parked.difference_update(request_ids)

    def step(self) -> EngineCoreOutputs:
        self.before_step(self.num_steps)
        self.num_steps += 1
        rows = list(self.requests.values())[: self._running]
        outputs = [self._advance(request) for request in rows]
        self.num_tokens += len(rows)
        self.num_blocks_in_use = len(rows)
        return EngineCoreOutputs(outputs=outputs, stats=self.stats(), timestamp=time.monotonic(), num_deferred_reqs=5)

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
        return bool(self.requests)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.num_resets += 1
        return reset_running_requests or not self.requests

    def warm_up(self) -> None:
        """Do nothing: there is nothing to compile."""

    def shutdown(self) -> None:
        self.num_shutdowns += 1

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


class BytesClient:
    """Sends every message through msgpack, typed both ways, as a client in another process does."""

    def __init__(self, core: CoreClient) -> None:
        self._core = core
        self._requests = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._ids = msgspec.msgpack.Decoder(list[str])
        self._outputs = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._stats = msgspec.msgpack.Decoder(SchedulerStats)

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    def stats(self) -> SchedulerStats:
        return self._stats.decode(msgspec.msgpack.encode(self._core.stats()))

    def add_request(self, request: EngineCoreRequest) -> None:
        received = self._requests.decode(msgspec.msgpack.encode(request))
        assert received == request
        self._core.add_request(received)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._core.abort_requests(self._ids.decode(msgspec.msgpack.encode(list(request_ids))))

    def release(self, request_ids: Iterable[str]) -> None:
        self._core.release(self._ids.decode(msgspec.msgpack.encode(list(request_ids))))

    def step(self) -> EngineCoreOutputs:
        outputs = self._core.step()
        received = self._outputs.decode(msgspec.msgpack.encode(outputs))
        assert received == outputs
        return received

    def has_unfinished_requests(self) -> bool:
        return self._core.has_unfinished_requests()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self._core.reset_prefix_cache(reset_running_requests)

    def warm_up(self) -> None:
        self._core.warm_up()

    def shutdown(self) -> None:
        self._core.shutdown()


def hashed_tokens(request: EngineCoreRequest, low: int = 300, high: int = 330) -> list[int]:
    """Return tokens that depend on the prompt, and on the seed unless the request is greedy."""
    seed = request.seed if request.sampling_params.temperature else 0
    tokens: list[int] = []
    for position in range(request.max_tokens):
        digest = hashlib.sha256(repr((request.prompt_token_ids, seed, position)).encode()).digest()
        tokens.append(low + digest[0] % (high - low))
    return tokens

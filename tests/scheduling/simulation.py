"""A fake device and a driver for the scheduler: what is generated must equal what a loop over one request gives.

The keys and values of a position depend on all tokens up to it. Here they are one number, a digest of those tokens (and
of the cache salt, so that sharing across salts shows). The device keeps them in slots, as the real pool does, and every
row reads back its whole context: a slot that holds anything but the right digest fails at once.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field

from jaxllm.engine.messages import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.plan import Chunk, StepPlan, StepResult
from jaxllm.scheduling.scheduler import Scheduler

VOCAB_SIZE = 50
EOS = 0
NOT_SAMPLED = -7
MAX_OVERLAP = 2


def make_config(**changes: object) -> SchedulerConfig:
    """Return a roomy configuration with `changes` applied."""
    settings: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 129,
    }
    return SchedulerConfig(**{**settings, **changes})  # pyright: ignore[reportArgumentType]


def make_request(
    request_id: str,
    prompt: list[int] | int,
    *,
    max_tokens: int = 4,
    eos: int | None = None,
    priority: int = 0,
    salt: str | None = None,
    seed: int = 0,
    arrival_time: float = 0.0,
    **params: object,
) -> EngineCoreRequest:
    """Return a request; an int as prompt means that many tokens that no other request shares."""
    if isinstance(prompt, int):
        prompt = [random.Random(f"{request_id} {i}").randrange(VOCAB_SIZE) for i in range(prompt)]
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),  # pyright: ignore[reportArgumentType]
        eos_token_id=eos,
        max_tokens=max_tokens,
        seed=seed,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=salt,
    )


def first_digest(salt: str | None) -> int:
    return zlib.crc32((salt or "").encode())


def extend_digest(digest: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), digest)


def sample(digest: int, seed: int, banned: tuple[int, ...]) -> int:
    """Return the token that follows a context: the fake model."""
    token_id = zlib.crc32(digest.to_bytes(4, "little") + seed.to_bytes(8, "little")) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


@dataclass
class Truth:
    """What a request must give, from a plain loop over its tokens."""

    request: EngineCoreRequest
    outputs: list[int]
    digests: array[int]
    """One per position of prompt and outputs, and of what rows in flight may add after the end."""
    finish_reason: str
    stop_reason: int | None


def generate_alone(request: EngineCoreRequest, max_model_len: int) -> Truth:
    """Generate one request by itself, written independently of the scheduler's code."""
    digest, digests, outputs = first_digest(request.cache_salt), array("q"), []
    for token_id in request.prompt_token_ids:
        digest = extend_digest(digest, token_id)
        digests.append(digest)
    stop_ids = list(request.sampling_params.stop_token_ids or [])
    endings = stop_ids if request.eos_token_id is None else [request.eos_token_id, *stop_ids]
    end: tuple[str, int | None] | None = None
    while end is None:
        is_early = len(outputs) < request.sampling_params.min_tokens
        outputs.append(sample(digest, request.seed, tuple(endings) if is_early else ()))
        digest = extend_digest(digest, outputs[-1])
        digests.append(digest)
        if outputs[-1] in endings:
            end = "stop", None if outputs[-1] == request.eos_token_id else outputs[-1]
        elif len(outputs) == request.max_tokens or len(digests) == max_model_len:
            end = "length", None
    for _ in range(MAX_OVERLAP):
        digest = extend_digest(digest, sample(digest, request.seed, ()))
        digests.append(digest)
    return Truth(request, outputs, digests, *end)


class FakeDevice:
    """Run plans in the order given, as the accelerator does, and check all that a plan promises."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        num_slots = config.num_blocks * config.block_size
        self.digests = array("q", [-1]) * num_slots
        self.token_ids = array("i", [-1]) * num_slots
        self._previous: list[int] = []

    def run(self, plan: StepPlan, truths: dict[str, Truth]) -> StepResult:
        self._check_shape(plan)
        inputs = [self._inputs(chunk) for chunk in plan.chunks]
        written: set[int] = set()
        for chunk, token_ids in zip(plan.chunks, inputs, strict=True):
            self._write(chunk, token_ids, truths[chunk.request_id].request.cache_salt, written)
        sampled = [self._attend(chunk, truths[chunk.request_id]) for chunk in plan.chunks]
        self._previous = sampled
        return StepResult(sampled, [TokenLogprobs([token_id], [-1.0], 1) for token_id in sampled])

    def _check_shape(self, plan: StepPlan) -> None:
        lengths = [chunk.num_tokens for chunk in plan.chunks]
        assert 0 < sum(lengths) == plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(lengths) <= self.config.max_num_seqs
        assert len({chunk.request_id for chunk in plan.chunks}) == len(lengths), "a request has two rows"
        assert all(length == 1 for length in lengths[: plan.num_decodes])
        assert all(length > 1 for length in lengths[plan.num_decodes :]), "one-token chunks come first"
        if self.config.long_prefill_token_threshold:
            assert max(lengths) <= self.config.long_prefill_token_threshold

    def _inputs(self, chunk: Chunk) -> list[int]:
        if chunk.previous_row is None:
            return list(chunk.token_ids)
        assert list(chunk.token_ids) == [0]
        return [self._previous[chunk.previous_row]]

    def _slot(self, chunk: Chunk, position: int) -> int:
        block_id = chunk.block_ids[position // self.config.block_size]
        assert 0 < block_id < self.config.num_blocks
        return block_id * self.config.block_size + position % self.config.block_size

    def _write(self, chunk: Chunk, token_ids: list[int], salt: str | None, written: set[int]) -> None:
        digest = self.digests[self._slot(chunk, chunk.start - 1)] if chunk.start else first_digest(salt)
        for position, token_id in enumerate(token_ids, chunk.start):
            slot = self._slot(chunk, position)
            assert slot not in written, "two rows write to one slot"
            written.add(slot)
            digest = extend_digest(digest, token_id)
            self.digests[slot], self.token_ids[slot] = digest, token_id

    def _attend(self, chunk: Chunk, truth: Truth) -> int:
        size, end = self.config.block_size, chunk.start + chunk.num_tokens
        context = array("q")
        for block_id in chunk.block_ids:
            context.extend(self.digests[block_id * size : (block_id + 1) * size])
        assert context[:end] == truth.digests[:end], f"{chunk.request_id} reads a slot with wrong content"
        request = truth.request
        assert chunk.params is request.sampling_params
        assert (chunk.seed, chunk.num_prompt_tokens) == (request.seed, len(request.prompt_token_ids))
        if not chunk.samples:
            return NOT_SAMPLED
        assert chunk.num_output_tokens == end - chunk.num_prompt_tokens
        return sample(context[end - 1], chunk.seed, chunk.banned_token_ids)


@dataclass
class Seen:
    """What came out of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Simulation:
    """Drive a scheduler and a fake device, and compare every output with the truth as it comes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(config)
        self.truths: dict[str, Truth] = {}
        self.seen: dict[str, Seen] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.num_chunks: dict[str, int] = {}

    @property
    def live(self) -> list[str]:
        return [request_id for request_id, seen in self.seen.items() if seen.finish_reason is None]

    def add(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)
        self.truths[request.request_id] = generate_alone(request, self.config.max_model_len)
        self.seen[request.request_id] = Seen()

    def plan(self) -> StepPlan | None:
        """Plan a step and run it on the device at once; its result waits for `commit`."""
        plan = self.scheduler.plan([plan for plan, _ in self.in_flight])
        if plan is None:
            assert self.in_flight or not self.scheduler.has_unfinished_requests(), "stuck: nothing runs and nothing can"
            return None
        for chunk in plan.chunks:
            self.num_chunks[chunk.request_id] = self.num_chunks.get(chunk.request_id, 0) + 1
        self.in_flight.append((plan, self.device.run(plan, self.truths)))
        return plan

    def commit(self) -> list[EngineCoreOutput]:
        outputs = self.scheduler.commit(*self.in_flight.popleft())
        for output in outputs:
            truth, seen = self.truths[output.request_id], self.seen[output.request_id]
            assert seen.finish_reason is None, "an output after the end"
            seen.token_ids += output.new_token_ids
            seen.finish_reason = output.finish_reason
            assert seen.token_ids == truth.outputs[: len(seen.token_ids)], f"{output.request_id} differs"
            is_last = len(seen.token_ids) == len(truth.outputs)
            expected = (truth.finish_reason, truth.stop_reason) if is_last else (None, None)
            assert (output.finish_reason, output.stop_reason) == expected
        return outputs

    def abort(self, request_ids: list[str]) -> None:
        expected = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self.live]
        outputs = self.scheduler.abort_requests(request_ids)
        assert [output.request_id for output in outputs] == expected
        for output in outputs:
            assert (output.finish_reason, output.new_token_ids) == ("abort", [])
            self.seen[output.request_id].finish_reason = "abort"

    def step(self, overlap: int = 0) -> None:
        """Plan once, then commit until at most `overlap` steps are in flight (all of them if nothing could run)."""
        keep = overlap if self.plan() is not None else 0
        while len(self.in_flight) > keep:
            self.commit()

    def run(self, overlap: int = 0, max_steps: int | None = None) -> int:
        """Step to the end of all requests, checking the laws; return the number of steps."""
        if max_steps is None:  # each token of each request ten times over: far above what any sound policy needs
            max_steps = 10 + 10 * sum(len(self.truths[request_id].digests) for request_id in self.live)
        num_steps = 0
        while self.scheduler.has_unfinished_requests() or self.in_flight:
            self.step(overlap)
            self.check()
            num_steps += 1
            assert num_steps <= max_steps, "the workload does not come to an end"
        assert not self.live
        assert self.scheduler.stats().num_blocks_in_use == 0
        return num_steps

    def check(self) -> None:
        """Check the scheduler's laws, and that every block that can be found holds what is said of it."""
        self.scheduler.check()
        size = self.config.block_size
        for block_id, (_, token_bytes) in self.scheduler.cache.pool._content.items():
            assert self.device.token_ids[block_id * size : (block_id + 1) * size].tobytes() == token_bytes

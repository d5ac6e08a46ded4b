"""A fake device and a driver run the scheduler: what is generated must equal what a loop over one request gives.

The keys and values of a position depend on all tokens up to it. Here they are one number, a digest of those tokens (and
of the cache salt, so that sharing across salts shows). The device keeps them in slots, as the real pool does, and every
row reads back its whole context: a slot that holds anything but the right digest fails at once. Token counts are lists
of tokens by row, and a prompt token's log-probability is the digest that predicts it. What is pooled is the digest of
the last token, or of every token. A token of a picture takes the picture's row, and the positions of multimodal RoPE
count too, where they are not the token's own.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxllm.core_messages import (
    Clip,
    EngineCoreOutput,
    EngineCoreRequest,
    NextTokens,
    Pooled,
    PromptMedia,
    RequestError,
    TokenLogprobs,
)
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.cache.block_pool import NULL_BLOCK
from jaxllm.scheduling.cache.state_slots import NO_SLOTS
from jaxllm.scheduling.clips import ClipEncode
from jaxllm.scheduling.config import GroupConfig, SchedulerConfig
from jaxllm.scheduling.plan import Chunk, StepKind, StepPlan, StepResult
from jaxllm.scheduling.request import kind_of, needs_token_counts, waits_for_last_token
from jaxllm.scheduling.scheduler import Scheduler
from jaxllm.scheduling.step_builder import NOTHING_IN_FLIGHT, tally
from tests.scheduling.fake_host import FakeHost
from tests.scheduling.pictures import FeatureRows, Traits, end_of

VOCAB_SIZE = 50
EOS = 0
NOT_SAMPLED = -7
MAX_OVERLAP = 2


def make_config(*, num_blocks: int = 129, others: Iterable[GroupConfig] = (), **changes: object) -> SchedulerConfig:
    """Return a roomy configuration with `changes` applied: a group of `num_blocks` that keeps all, and `others`."""
    settings: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "groups": (GroupConfig(num_blocks=num_blocks), *others),
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
    arrival: int = 0,
    fork_of: str | None = None,
    keeps_blocks: bool = False,
    num_seats: int = 1,
    task: str | None = None,
    media: PromptMedia | None = None,
    clip: Clip | None = None,
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
        arrival=arrival,
        priority=priority,
        cache_salt=salt,
        fork_of=fork_of,
        keeps_blocks=keeps_blocks,
        num_seats=num_seats,
        pooling_params=None if task is None else PoolingParams(task=task),
        media=media,
        clip=clip,
    )


def first_digest(salt: str | None, clip: Clip | None = None) -> int:
    return zlib.crc32((salt or "").encode() + (b"" if clip is None else clip.key))


def extend_digest(digest: int, token_id: int, trait: bytes = b"") -> int:
    return zlib.crc32(token_id.to_bytes(4, "little") + trait, digest)


def ending_ids(request: EngineCoreRequest) -> list[int]:
    eos = [] if request.eos_token_id is None else [request.eos_token_id]
    return eos + list(request.sampling_params.stop_token_ids or [])


def sample(digest: int, seed: int, banned: list[int]) -> int:
    """Return the token that follows a context: the fake model."""
    token_id = zlib.crc32(digest.to_bytes(4, "little") + seed.to_bytes(8, "little")) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


@dataclass
class Truth:
    """The outcome that a request must have, from a plain loop over its tokens."""

    request: EngineCoreRequest
    outputs: list[int]
    digests: array[int]
    """One digest per position of prompt and outputs, and of what rows in flight may add after the end."""
    finish_reason: str
    stop_reason: int | None

    @property
    def pooled(self) -> Pooled | None:
        """Return what pooling must give."""
        digests = self.digests[: len(self.request.prompt_token_ids)]
        match kind_of(self.request.pooling_params and self.request.pooling_params.task):
            case StepKind.SAMPLE:
                return None
            case StepKind.POOL:
                return pool(digests[-1:])
            case StepKind.POOL_TOKENS:
                return pool(digests)

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_token_ids + self.outputs

    @property
    def scores(self) -> dict[int, TokenLogprobs]:
        """Return what the scored positions must give."""
        params, prompt = self.request.sampling_params, self.request.prompt_token_ids
        if params.prompt_logprobs is None and params.prompt_logprob_token_ids is None:
            return {}
        first = 1 if params.prompt_logprobs is not None else 1 + (params.prompt_logprob_start or 0)
        return {p: score(prompt[p], self.digests[p - 1]) for p in range(first, len(prompt))}


def pool(digests: array[int]) -> Pooled:
    return Pooled(digests.tobytes(), len(digests))


def score(token_id: int, digest: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-float(digest)], 1)


def generate_alone(request: EngineCoreRequest, max_model_len: int) -> Truth:
    """Generate one request by itself, written independently of the scheduler's code."""
    digest, digests, outputs, traits = first_digest(request.cache_salt, request.clip), array("q"), [], Traits(request)
    for token_id in request.prompt_token_ids:
        digest = extend_digest(digest, token_id, traits[len(digests)])
        digests.append(digest)
    if request.pooling_params is not None:
        return Truth(request, outputs, digests, "stop", None)
    endings = ending_ids(request)
    end: tuple[str, int | None] | None = None
    while end is None:
        is_early = len(outputs) < request.sampling_params.min_tokens
        outputs.append(sample(digest, request.seed, endings if is_early else []))
        digest = extend_digest(digest, outputs[-1], traits[len(digests)])
        digests.append(digest)
        if outputs[-1] in endings:
            end = "stop", None if outputs[-1] == request.eos_token_id else outputs[-1]
        elif len(outputs) == request.max_tokens or len(digests) == max_model_len:
            end = "length", None
    for _ in range(MAX_OVERLAP):
        digest = extend_digest(digest, sample(digest, request.seed, []), traits[len(digests)])
        digests.append(digest)
    return Truth(request, outputs, digests, *end)


def state_of(scheduler: Scheduler, request_id: str) -> str:
    """Return "waiting", "running" or "preempted"; raise KeyError if the request has ended or never came."""
    request = scheduler._requests[request_id]
    if request not in scheduler._waiting:
        return "running"
    return "waiting" if request.scheduled_ts is None else "preempted"


def _seconds(plan: StepPlan) -> float:
    return 0.002 + 0.001 * plan.num_tokens


class FakeDevice:
    """Run plans in the order given, as the accelerator does, and check all that a plan promises."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        num_slots = [group.num_blocks * config.block_size for group in config.groups]
        # In each cache group, what every slot holds.
        self.digests = [array("q", [-1]) * num for num in num_slots]
        self.token_ids = [array("i", [-1]) * num for num in num_slots]
        self.counts: list[list[int]] = [[] for _ in range(config.max_num_seqs + 1)]
        """The tokens in each row of the token counts."""
        self._previous: list[int] = []
        self.states: list[int | None] = [None] * config.num_state_slots
        """What each slot of recurrent state has seen."""
        self.features = FeatureRows(config)
        self.clips: list[bytes | None] = [None] * config.num_clip_blocks
        """The key of the clip that each block has a part of."""

    def run(self, plan: StepPlan, truths: dict[str, Truth]) -> StepResult:
        self._check_shape(plan)
        for group, copies in enumerate(plan.copies):
            self._copy(group, copies)
        self.features.encode(plan.encodes)
        self._encode_clips(plan.clips)
        inputs = [self._inputs(chunk) for chunk in plan.chunks]
        written: set[tuple[int, int]] = set()
        for chunk, token_ids in zip(plan.chunks, inputs, strict=True):
            self._write(chunk, token_ids, truths[chunk.request_id].request, written)
        contexts = [self._attend(chunk, truths[chunk.request_id]) for chunk in plan.chunks]
        self._recur(plan, contexts)
        if plan.kind is not StepKind.SAMPLE:
            pooled = [self._pool(plan.kind, *each) for each in zip(plan.chunks, contexts, strict=True)]
            self._previous = []
            return StepResult([], [], [], pooled, _seconds(plan))
        scores = [self._score(chunk, context) for chunk, context in zip(plan.chunks, contexts, strict=True)]
        sampled = [
            self._sample(chunk, context, truths[chunk.request_id])
            for chunk, context in zip(plan.chunks, contexts, strict=True)
        ]
        self._previous = [tokens[-1] for tokens in sampled]
        logprobs = [
            None if chunk.params.num_logprobs is None else [TokenLogprobs([token_id], [-1.0], 1) for token_id in tokens]
            for chunk, tokens in zip(plan.chunks, sampled, strict=True)
        ]
        before_drafts = {row: tokens[:-1] for row, tokens in enumerate(sampled) if len(tokens) > 1}
        return StepResult(self._previous, logprobs, scores, (), _seconds(plan), before_drafts)

    def _encode_clips(self, encodes: Sequence[ClipEncode]) -> None:
        """Write clips, as before a step."""
        written = [block_id for encode in encodes for block_id in encode.block_ids]
        assert len(set(written)) == len(written), "two clips of a step are written to one block"
        assert 0 not in written, "a clip is written to the null block"
        num_frames = sum(encode.clip.num_frames for encode in encodes)
        assert len(encodes) <= 1 or num_frames <= self.config.max_num_batched_tokens, "a step encodes too much"
        for encode in encodes:
            assert len(encode.block_ids) == self.config.clip_blocks
            for block_id in encode.block_ids:
                self.clips[block_id] = encode.clip.key

    def _check_shape(self, plan: StepPlan) -> None:
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        assert 0 < sum(lengths) == plan.num_tokens <= self.config.max_num_batched_tokens
        alignment = self.config.row_alignment
        rows = [lengths.count(1), *(length for length in lengths if length > 1)]
        most_rows = -(-self.config.max_num_batched_tokens // alignment)
        assert sum(-(-num // alignment) for num in rows) <= most_rows
        assert len(lengths) <= self.config.max_num_seqs
        num_rows = sum(1 + len(chunk.scored_ids) + chunk.num_drafts for chunk in plan.chunks)
        assert plan.num_rows == num_rows <= self.config.num_rows
        rows = [chunk.owner.count_row for chunk in plan.chunks if chunk.owner.count_row is not None]
        assert len(set(rows)) == len(rows), "two requests count in one row"
        assert 0 not in rows, "row 0 is for those that count nothing"
        assert len({chunk.request_id for chunk in plan.chunks}) == len(lengths), "a request has two rows"
        assert lengths == sorted(lengths, key=lambda length: length > 1), "one-token chunks come first"
        tasks = [chunk.owner.pooling and chunk.owner.pooling.task for chunk in plan.chunks]
        assert {kind_of(task) for task in tasks} == {plan.kind}, "requests of two kinds are in one step"
        assert not any(chunk.samples for chunk in plan.chunks if chunk.owner.pooling is not None)
        for chunk, task, length in zip(plan.chunks, tasks, lengths, strict=True):
            if task in self.config.whole_tasks:
                assert length == chunk.owner.num_prompt_tokens, f"{chunk.request_id} does not run whole"
            elif self.config.long_prefill_token_threshold and not chunk.num_drafts:
                assert length <= self.config.long_prefill_token_threshold

    def _copy(self, group: int, copies: tuple[tuple[int, int], ...]) -> None:
        targets = {target for _, target in copies}
        assert len(targets) == len(copies), "a block is copied to twice"
        assert not targets & {0, *(source for source, _ in copies)}, "a target is a source or the null block"
        size = self.config.block_size
        for source, target in copies:
            for content in (self.digests[group], self.token_ids[group]):
                content[target * size : (target + 1) * size] = content[source * size : (source + 1) * size]

    def _inputs(self, chunk: Chunk) -> list[int]:
        if chunk.previous_row is None:
            return list(chunk.token_ids)
        assert list(chunk.token_ids) == [0]
        return [self._previous[chunk.previous_row]]

    def _slot(self, group: int, chunk: Chunk, position: int) -> int:
        block_id = chunk.block_ids[group][position // self.config.block_size]
        assert 0 < block_id < self.config.groups[group].num_blocks
        return block_id * self.config.block_size + position % self.config.block_size

    def _write(
        self, chunk: Chunk, token_ids: list[int], request: EngineCoreRequest, written: set[tuple[int, int]]
    ) -> None:
        traits, digest = self.features.read(chunk, request), first_digest(request.cache_salt, request.clip)
        assert (chunk.owner.clip_blocks is None) == (request.clip is None)
        for block_id in chunk.owner.clip_blocks or ():
            assert request.clip is not None
            assert self.clips[block_id] == request.clip.key, f"{chunk.request_id} attends to another clip"
        if chunk.start:
            digest = self.digests[0][self._slot(0, chunk, chunk.start - 1)]
        for position, token_id in enumerate(token_ids, chunk.start):
            digest = extend_digest(digest, token_id, traits[position - chunk.start])
            for group, (digests, held) in enumerate(zip(self.digests, self.token_ids, strict=True)):
                slot = self._slot(group, chunk, position)
                assert (group, slot) not in written, "two rows write to one slot"
                written.add((group, slot))
                digests[slot], held[slot] = digest, token_id

    def _attend(self, chunk: Chunk, truth: Truth) -> array[int]:
        """Return the content of the positions up to the chunk's end."""
        size, end = self.config.block_size, chunk.start + len(chunk.token_ids)
        contexts = []
        for group, digests, block_ids in zip(self.config.groups, self.digests, chunk.block_ids, strict=True):
            context = array("q")
            for block_id in block_ids:
                context.extend(digests[block_id * size : (block_id + 1) * size])
            tile = size * group.tile_blocks
            first = 0 if group.window is None else max(0, chunk.start - group.window + 1) // tile * tile
            if group.attention_chunk is not None:
                first = chunk.start - chunk.start % group.attention_chunk
                assert end <= first + group.attention_chunk, f"{chunk.request_id} attends within two chunks at once"
            known = end - chunk.num_drafts
            right = context[first:known] == truth.digests[first:known]
            assert right, f"{chunk.request_id} reads a slot with wrong content"
            contexts.append(context)
        context = contexts[0]
        request = truth.request
        assert chunk.params is request.sampling_params
        assert (chunk.owner.seed, chunk.owner.num_prompt_tokens) == (request.seed, len(request.prompt_token_ids))
        return context[:end]

    def _recur(self, plan: StepPlan, contexts: list[array[int]]) -> None:
        """Take each chunk's state from the slot that it reads to those that it writes, all chunks at once."""
        if not self.states:
            assert all(chunk.state_slots == NO_SLOTS for chunk in plan.chunks)
            return
        written: dict[int, int] = {}
        used: list[int] = []
        for chunk, context in zip(plan.chunks, contexts, strict=True):
            slots, end = chunk.state_slots, chunk.start + len(chunk.token_ids)
            before = self.states[slots.read] if slots.read else None
            assert (slots.read > 0) == (chunk.start > 0), f"{chunk.request_id} begins in the middle"
            assert before == (context[chunk.start - 1] if chunk.start else None), f"{chunk.request_id}: wrong state"
            assert slots.write > 0
            assert not slots.save or chunk.start < slots.save_at <= end
            saved = {slots.save: context[slots.save_at - 1]} if slots.save else {}
            assert len(slots.drafted) == chunk.num_drafts, "the state after a draft is not kept"
            kept = dict(zip(slots.drafted, context[chunk.start :], strict=False))
            mine = {slots.write: context[end - 1], **saved, **kept}
            assert len(mine) == 1 + len(saved) + chunk.num_drafts, "a chunk writes twice to one slot"
            assert not mine.keys() & written.keys(), "two chunks write to one slot"
            written |= mine
            used.append(slots.read if slots.read != slots.write else 0)
        assert not written.keys() & set(used), "a slot is read by one chunk and written to by another"
        for slot, digest in written.items():
            self.states[slot] = digest

    def _pool(self, kind: StepKind, chunk: Chunk, context: array[int]) -> Pooled | None:
        assert chunk.owner.count_row is None, "what is pooled counts no tokens"
        if kind is StepKind.POOL_TOKENS:
            return pool(context[chunk.start :])
        return pool(context[-1:]) if len(context) == chunk.owner.num_prompt_tokens else None

    def _score(self, chunk: Chunk, context: array[int]) -> list[TokenLogprobs]:
        if chunk.scored_ids:
            assert chunk.start < chunk.score_start <= chunk.start + len(chunk.token_ids) + 1 - len(chunk.scored_ids)
        return [score(token_id, context[p - 1]) for p, token_id in enumerate(chunk.scored_ids, chunk.score_start)]

    def _sample(self, chunk: Chunk, context: array[int], truth: Truth) -> list[int]:
        """Return what is sampled before each draft and after the last token."""
        request, end = truth.request, len(context) - chunk.num_drafts
        counts = None if chunk.owner.count_row is None else self.counts[chunk.owner.count_row]
        needs_counts = self.config.tracks_all_tokens or needs_token_counts(chunk.params)
        assert (counts is not None) == needs_counts
        if chunk.history is not None:
            assert counts is not None
            counts[:] = chunk.history
        if not chunk.samples:
            return [NOT_SAMPLED]
        assert chunk.num_output_tokens == len(context) - chunk.owner.num_prompt_tokens
        tokens: list[int] = []
        for last in range(end, len(context) + 1):
            is_early = last - chunk.owner.num_prompt_tokens < chunk.params.min_tokens
            tokens.append(sample(context[last - 1], chunk.owner.seed, ending_ids(request) if is_early else []))
        if counts is not None:
            # Rows in flight go on after the request's end, where there is no truth to compare with.
            assert counts[: len(truth.token_ids)] == truth.token_ids[:end], f"{chunk.request_id} counts wrong tokens"
            assert len(counts) == end
            counts += tokens[: 1 + num_right(chunk.drafts, tokens)]
        return tokens


def num_right(drafts: array[int], tokens: list[int]) -> int:
    """Count the leading drafts that are what was sampled."""
    pairs = zip(drafts, tokens, strict=False)
    return next((place for place, (draft, token_id) in enumerate(pairs) if draft != token_id), len(drafts))


@dataclass
class Seen:
    """The outputs of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    scores: dict[int, TokenLogprobs] = field(default_factory=dict)


def all_outputs(outputs: list[EngineCoreOutput], next_tokens: NextTokens) -> list[EngineCoreOutput]:
    """Return the outputs of a step, with one for each of its other tokens."""
    return [*outputs, *next_tokens.outputs()]


class Simulation:
    """Drive a scheduler and a fake device, and compare every output with the truth as it comes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now = 0.0
        """The scheduler's time in seconds: a plan takes a hundredth."""
        self.host = FakeHost(config.block_size)
        self.scheduler = Scheduler(config, lambda: self.now, self.host)
        self.device = FakeDevice(config)
        self.truths: dict[str, Truth] = {}
        self.seen: dict[str, Seen] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.num_chunks: dict[str, int] = {}
        self.num_copies = self.num_encodes = self.num_holds = 0
        self.has_passed = False
        """Whether the last plan has all that another prompt lacks, but not of the first in line."""
        hold = self.scheduler.media._hold

        def count_hold(request_id: str, key: bytes) -> None:
            self.num_holds += 1
            hold(request_id, key)

        self.scheduler.media._hold = count_hold

    @property
    def live(self) -> list[str]:
        return [request_id for request_id, seen in self.seen.items() if seen.finish_reason is None]

    def add(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)
        self.truths[request.request_id] = generate_alone(request, self.config.max_model_len)
        self.seen[request.request_id] = Seen()

    def plan(self) -> StepPlan | None:
        """Plan a step and run it on the device at once; its result waits for `commit`."""
        in_line = self._in_line()
        self.now += 0.01
        self._end_moves()
        plan = self._plan()
        if plan is None and not self.in_flight:
            # As beam searches do, which hold seats until then. An id may have come again while its seat is held.
            self.scheduler.release(list(self.seen))
            plan = self._plan()
        while plan is None and not self.in_flight and self.scheduler.tiers.is_fetching:
            self._end_moves(all_of_them=True)
            plan = self._plan()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_unfinished_requests(), "stuck: nothing runs and nothing can"
            return None
        self._check_passed(plan, in_line)
        # Params are one object per request, while an id may come again.
        sampled = {id(chunk.params) for plan, _ in self.in_flight for chunk in plan.chunks if chunk.samples}
        for chunk in plan.chunks:
            self.num_chunks[chunk.request_id] = self.num_chunks.get(chunk.request_id, 0) + 1
            assert not waits_for_last_token(chunk.params) or id(chunk.params) not in sampled, (
                "it needs a token in flight"
            )
        self.num_copies += sum(map(len, plan.copies))
        self.num_encodes += len(plan.encodes)
        self.in_flight.append((plan, self.device.run(plan, self.truths)))
        return plan

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.host.begin(self.scheduler.tiers.take_moves(), self.device)
        return plan

    def _end_moves(self, *, all_of_them: bool = False) -> None:
        self.host.end_some(self.scheduler.tiers, self.device, all_of_them=all_of_them)

    def _in_line(self) -> dict[str, int]:
        """Return the number of prompt tokens that each request lacks, in the policy's order."""
        scheduler = self.scheduler
        ahead = tally(scheduler._in_flight.values())
        requests = [*scheduler._waiting, *scheduler._prompts.reading]
        return {
            request.request_id: request.num_tokens
            - scheduler.num_computed_tokens(request.request_id)
            - ahead.get(request, NOTHING_IN_FLIGHT).num_tokens
            for request in sorted(requests, key=lambda request: request.order)
        }

    def _check_passed(self, plan: StepPlan, in_line: Mapping[str, int]) -> None:
        """Check that a waiting request is admitted before another only if the first in line has its share."""
        chunks = {chunk.request_id: chunk for chunk in plan.chunks}
        first = next(iter(in_line), None)
        self.has_passed = False
        # A prompt whose beginning is cached, or a donor's, may be done with fewer tokens than it lacks.
        if first is None or first not in chunks or chunks[first].samples:
            return
        if len(chunks[first].token_ids) >= in_line[first]:  # what is pooled samples nothing
            return
        later = [chunk for name, chunk in chunks.items() if name != first and name in in_line]
        self.has_passed = any(chunk.samples for chunk in later)
        request = self.scheduler._requests[first]
        is_cut = request.media or request.is_scored or self.config.attention_chunks or self.scheduler.cache.slots
        if self.config.max_num_batched_tokens >= 2 * self.config.max_num_seqs and not is_cut:
            threshold = self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens
            num_first, num_later = len(chunks[first].token_ids), sum(len(chunk.token_ids) for chunk in later)
            assert num_first >= min(threshold, num_later // 3), f"{first} is passed by {num_later} tokens"

    def commit(self) -> list[EngineCoreOutput]:
        outputs = all_outputs(*self.scheduler.commit(*self.in_flight.popleft()))
        for output in outputs:
            truth, seen = self.truths[output.request_id], self.seen[output.request_id]
            assert seen.finish_reason is None, "an output after the end"
            if output.new_prompt_logprobs is not None:
                scores = output.new_prompt_logprobs
                seen.scores |= dict(enumerate(scores.positions, scores.start))
                assert seen.scores.items() <= truth.scores.items(), f"{output.request_id} is scored wrong"
                assert scores.positions
            assert output.pooled == (truth.pooled if output.finish_reason == "stop" else None)
            seen.token_ids += output.new_token_ids
            assert seen.scores == truth.scores or not seen.token_ids, "a position was not scored"
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

    def end(self, request_id: str, finish_reason: str, error: RequestError | None = None) -> None:
        (output,) = self.scheduler.end(request_id, finish_reason, error)
        assert (output.finish_reason, output.error, output.new_token_ids) == (finish_reason, error, [])
        self.seen[request_id].finish_reason = finish_reason

    def abandon(self, error: RequestError) -> None:
        """Fail the steps in flight, and lose what the device holds."""
        expected = self.live
        outputs = self.scheduler.abandon(error)
        assert [output.request_id for output in outputs] == expected
        for output in outputs:
            assert (output.finish_reason, output.error, output.new_token_ids) == ("error", error, [])
            self.seen[output.request_id].finish_reason = "error"
        self.device = FakeDevice(self.config)
        self.host.lose_moves()
        self.in_flight.clear()

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
        cache = self.scheduler.cache
        for number, group in enumerate(cache.groups):
            parked = {block_id for _, table in cache.parked.values() for block_id in table.block_ids[number]}
            assert group.pool.num_in_use == len(parked - {NULL_BLOCK})
        return num_steps

    def run_arriving(self, requests: list[EngineCoreRequest], seed: int, overlap: int) -> None:
        """Let requests arrive a few at a time, with steps in between, and run all of them to their ends."""
        rng, pending = random.Random(seed), list(requests)
        while pending:
            for request in pending[: rng.randrange(1, 5)]:
                self.add(pending.pop(0))
                assert request.request_id in self.seen
            for _ in range(rng.randrange(6)):
                self.step(overlap)
                self.check()
        self.run(overlap)

    def check(self) -> None:
        """Check the scheduler's laws, and that every block that can be found holds what is said of it."""
        self.scheduler.check()
        self.device.features.check(self.scheduler.media)
        self._check_holders()
        size = self.config.block_size
        for group, held in zip(self.scheduler.cache.groups, self.device.token_ids, strict=True):
            for block_id, (_, token_bytes) in group.pool._content.items():
                assert held[block_id * size : (block_id + 1) * size].tobytes() == token_bytes

    def _check_holders(self) -> None:
        """Check that a request holds an item only while it is in the middle of it."""
        ahead = tally(self.scheduler._in_flight.values())
        for request_id, keys in self.scheduler.media._held.items():
            request = self.scheduler._requests[request_id]
            assert request.media is not None
            computed = self.scheduler.cache.tables[request_id].num_computed_tokens
            planned = computed + ahead.get(request, NOTHING_IN_FLIGHT).num_tokens
            begun = [item for item in request.media.items if item.spans[0].offset < planned < end_of(item)]
            assert list(keys) in ([], [item.key for item in begun]), f"{request_id} holds what it does not need"

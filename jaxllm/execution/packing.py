"""Pack a step's inputs into two buffers, one of int32 and one of float32: 2 transfers instead of 40.

The records alone decide where an array lies (see `jaxllm.sampling.inputs`), for the host that fills the buffers and for
the step that reads them: a new field of a record needs no other change. numpy only.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from jax import Array

from jaxllm.models.inputs import MediaTokens, TokenBatch
from jaxllm.params.limits import MAX_LOGIT_BIASES, MAX_LOGPROB_TOKEN_IDS
from jaxllm.sampling.inputs import Packed, RareRules, Rules, SamplingBatch, TranscriptRows, Uses
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.recurrent_state import StateBatch


class Bucket(NamedTuple):
    """The shape that a step is padded to."""

    num_tokens: int
    num_seqs: int


_HALVES = (384, 768, 1536)
"""Sizes between powers of two at which steps of an accelerator are bound by arithmetic: larger ones are mostly full."""


def make_buckets(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    least: int,
    sizes: Sequence[int] | None = None,
    *,
    halves: bool = False,
) -> tuple[Bucket, ...]:
    """Return buckets of `sizes` tokens, and of the token budget, with as many sequences as they hold.

    Sizes are rounded up to a multiple of `least`; by default they are `least`, doubled each time, and with `halves`
    those between where padding takes an accelerator time.
    """
    # Without a bucket for the budget, the fullest steps would be padded.
    doubled = _doubled(least, max_num_batched_tokens)
    between = _HALVES if halves else ()
    wanted = [*([*doubled, *between] if sizes is None else sizes), max_num_batched_tokens]
    rounded = {-(-size // least) * least for size in wanted if size <= max_num_batched_tokens}
    most_seqs = _doubled(least, max_num_seqs)[-1]
    return tuple(Bucket(size, min(size, most_seqs)) for size in sorted(rounded))


def pick_bucket(buckets: Sequence[Bucket], num_tokens: int, num_seqs: int) -> Bucket:
    """Return the smallest bucket that holds a step. Raise ValueError when none does: a plan beyond its budget."""
    for bucket in buckets:
        if num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs:
            return bucket
    raise ValueError(f"a step of {num_tokens} tokens and {num_seqs} sequences is larger than any of {tuple(buckets)}")


def _doubled(least: int, most: int) -> list[int]:
    """Return `least`, doubled each time, up to the first number that is no less than `most`."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes


type _ExtraArgs = tuple[tuple[str, int | float], ...]
"""The names of the logits processors' arguments, with their defaults, which have the arrays' types."""

_AXES = frozenset("tsmiwbnd23")
"""The letters of the axes, in order: tokens, rows (the first ones are the sequences'), blocks, tiles, words of bits,
biases, ids asked for, drafts, pairs, and triples."""


class CrossShape(NamedTuple):
    """The sizes of attention to an encoder's frames."""

    num_frames: int
    """The frames of every clip."""
    max_blocks: int
    """Their blocks."""
    query_tile: int
    """The rows of a prefill tile."""


class BatchShape(NamedTuple):
    """The sizes that fix the shapes of a step's inputs."""

    bucket: Bucket
    max_blocks: int
    """The blocks of the longest request."""
    query_tiles: tuple[int, ...]
    """The rows of a prefill tile in each cache group."""
    attention_chunks: tuple[int | None, ...]
    """The chunks of positions within which each cache group attends; None where there are none."""
    row_alignment: int
    """Chunks of two tokens or more start at a multiple of this row."""
    extra_args: _ExtraArgs = ()
    """The arguments that the logits processors take."""
    has_states: bool = False
    """True if the model has recurrent state."""
    max_drafts: int = 0
    """The most drafts that a chunk can have."""
    has_media: bool = False
    """True if the model sees images."""
    has_vectors: bool = False
    """True if requests may name steering vectors."""
    cross: CrossShape | None = None
    """The sizes of attention to an encoder's frames; None in a model without it."""
    first_timestamp: int | None = None
    """The id of a transcript's first timestamp; None in a model whose outputs follow no rules of transcripts."""

    def max_tiles(self, query_tile: int) -> int:
        """Return the most tiles of a step: every chunk takes 2 rows or more, and may leave one tile part-filled."""
        t, s = self.bucket
        num_chunks = min(s, -(-t // max(2, self.row_alignment)))
        return t // query_tile + num_chunks


class Sequences(NamedTuple):
    """The rows of tokens of each sequence: the part of `AttentionBatch` that all layers share."""

    query_starts_s: Array
    query_ends_s: Array
    num_decodes: Array


class Placement(NamedTuple):
    """The blocks of a cache group's tokens, and the tiles of its attention: the other part of `AttentionBatch`."""

    context_lens_s: Array
    """The tokens of each sequence up to the step's end, from the first token of its block table on."""
    slots_t: Array
    block_tables_sm: Array
    tile_seqs_i: Array
    tile_rows_i: Array
    num_tiles: Array

    def batch(self, sequences: Sequences) -> AttentionBatch:
        """Return the batch for the group's attention."""
        return AttentionBatch(**sequences._asdict(), **self._asdict())


class StatePlaces(NamedTuple):
    """The slots of the recurrent states of the step's sequences: a part of `StateBatch`."""

    read_slots_s: Array
    write_slots_s: Array
    save_ends_s: Array
    save_slots_s: Array

    def batch(self, sequences: Sequences) -> StateBatch:
        """Return the batch for ops of recurrent state."""
        return StateBatch(**sequences._asdict(), **self._asdict())


class DraftPlaces(NamedTuple):
    """The slots of the states after tokens of chunks with drafts: a part of `StateBatch`."""

    row_slots_t: Array


class SteeringRows(NamedTuple):
    """The steering vector that is added to each token, and its scale."""

    vectors_t: Array
    """The number of the vector, from 1; 0 for none."""
    scales_t: Annotated[Array, Packed(np.float32)]


class _LogitRows(NamedTuple):
    """The token of each row of logits, and the tokens that only the device knows."""

    logit_tokens_s: Array
    """The token whose hidden state gives the row."""
    previous_rows_s: Annotated[Array, Packed(neutral=-1)]
    """The row of the last step that sampled the sequence's only token; -1 if its token is in the batch."""
    num_rows: Array
    """The number of rows in use."""


class PackedInputs(NamedTuple):
    """The records of a step: views of the host's buffers, or slices of traced ones."""

    tokens: TokenBatch
    sequences: Sequences
    placements: tuple[Placement, ...]
    """One record for each cache group."""
    cross: tuple[Placement, ...]
    """One record if the model attends to an encoder's frames, else none: the tokens of a step stand for a clip's last
    frames."""
    states: tuple[StatePlaces, ...]
    """One record if the model has recurrent state, else none."""
    drafted: tuple[DraftPlaces, ...]
    """One record if the model has recurrent state and chunks may have drafts, else none."""
    media: tuple[MediaTokens, ...]
    """One record if the model sees images, else none."""
    steering: tuple[SteeringRows, ...]
    """One record if requests may name steering vectors, else none."""
    logit_rows: _LogitRows
    sampling: SamplingBatch
    rules: Rules
    transcripts: tuple[TranscriptRows, ...]
    """One record if outputs follow the rules of transcripts, else none."""
    uses: Uses

    @property
    def media_tokens(self) -> MediaTokens | None:
        """Return the record of media, None if there is none."""
        return self.media[0] if self.media else None

    def batches(self, *, decodes_only: bool) -> list[AttentionBatch]:
        """Return the batch for each cache group's attention; a step of decodes alone has no tiles."""
        batches = [placement.batch(self.sequences) for placement in (*self.placements, *self.cross)]
        return [batch.without_tiles() for batch in batches] if decodes_only else batches

    def state_batch(self, *, decodes_only: bool) -> StateBatch | None:
        """Return the batch for ops of recurrent state, None if there is none; a step of decodes alone has no chunks."""
        if not self.states:
            return None
        batch = self.states[0].batch(self.sequences)
        for places in self.drafted:
            batch = batch._replace(row_slots_t=places.row_slots_t)
        return batch.without_chunks() if decodes_only else batch


class ArrayField(NamedTuple):
    """The packing of an array of a record: its axes, its type and its neutral value."""

    axes: str
    packed: Packed


class RareSpec(NamedTuple):
    """The shape and packing of an array that is sent on its own."""

    shape: tuple[int, ...]
    packed: Packed

    def neutral(self) -> np.ndarray:
        """Return the array that stands for no use by any row."""
        return np.full(self.shape, self.packed.neutral, self.packed.dtype)


def array_fields(record: type) -> tuple[ArrayField | None, ...]:
    """Return how each array of a record is packed; None for a dict, which holds the processors' arguments."""
    fields = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        suffix = name.rpartition("_")[2]
        axes = suffix if len(suffix) <= 2 and _AXES.issuperset(suffix) else ""
        packed = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Packed)), Packed())
        fields.append(None if hint == dict[str, Array] else ArrayField(axes, packed))
    return tuple(fields)


# Read once: reading annotations takes longer than packing a step.
_HINTS = get_type_hints(PackedInputs)
_REPEATED = frozenset(name for name, hint in _HINTS.items() if get_origin(hint) is tuple)
_RECORDS = {
    name: (record, array_fields(record))
    for name, hint in _HINTS.items()
    for record in [get_args(hint)[0] if name in _REPEATED else hint]
}
_RARE = tuple(field for field in array_fields(RareRules) if field is not None)


def buffer_sizes(shape: BatchShape) -> tuple[int, int]:
    """Return the number of int32 and of float32 values in a step's buffers."""
    _, num_ints, num_floats = _lay_out(shape)
    return num_ints, num_floats


class StepBuffers(NamedTuple):
    """A step's two buffers on the host."""

    shape: BatchShape
    ints: np.ndarray
    floats: np.ndarray
    records: PackedInputs
    """Views of the buffers."""


def allocate(shape: BatchShape) -> StepBuffers:
    """Return new buffers with neutral values."""
    slices, num_ints, num_floats = _lay_out(shape)
    # Zeros are right for most padding: token 0 at position 0, written to the null block, in sequences of length 0.
    ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
    arrays = _cut(ints, floats, slices)
    for array, (packed, *_) in zip(arrays, slices, strict=True):
        if packed.neutral:
            array[...] = packed.neutral
    return StepBuffers(shape, ints, floats, _assemble(arrays, shape))


_MOST_FREE = 2
"""The buffers of a shape that wait to be used again: no more steps are on their way at once."""


class BufferPool:
    """Buffers of the steps of one model, which are used again: making views of new memory takes longer than a copy.

    The devices may read a step's buffers until a later step has ended: of several devices, one may have ended its part
    of a step before another one, but a later step needs all of them to have ended it.
    """

    def __init__(self) -> None:
        self._in_use: deque[StepBuffers] = deque()
        self._free: defaultdict[BatchShape, list[StepBuffers]] = defaultdict(list)
        self._neutral: dict[BatchShape, StepBuffers] = {}

    def take(self, shape: BatchShape) -> StepBuffers:
        """Return buffers with neutral values for the next step."""
        if shape not in self._neutral:
            self._neutral[shape] = allocate(shape)
        return self.copy(self._neutral[shape])

    def copy(self, buffers: StepBuffers) -> StepBuffers:
        """Return a copy of buffers for the next step."""
        free = self._free[buffers.shape]
        copy = free.pop() if free else allocate(buffers.shape)
        np.copyto(copy.ints, buffers.ints)
        np.copyto(copy.floats, buffers.floats)
        self._in_use.append(copy)
        return copy

    def end(self, buffers: StepBuffers) -> None:
        """Take back the buffers of the steps before a step that has ended. Steps may end late, or never."""
        if all(each is not buffers for each in self._in_use):
            return
        while buffers is not self._in_use[0]:
            before = self._in_use.popleft()
            free = self._free[before.shape]
            if len(free) < _MOST_FREE:
                free.append(before)


def unpack(ints: Any, floats: Any, shape: BatchShape) -> PackedInputs:
    """Cut two packed buffers into a step's records."""
    return _assemble(_cut(ints, floats, _lay_out(shape)[0]), shape)


def rare_specs(num_rows: int, vocab_size: int, max_drafts: int = 0) -> RareRules:
    """Return a RareSpec in place of each array."""
    sizes = {"s": num_rows, "w": -(-vocab_size // 32), "b": MAX_LOGIT_BIASES, "n": MAX_LOGPROB_TOKEN_IDS}
    sizes["d"] = max_drafts
    return RareRules(*(RareSpec(tuple([sizes[axis] for axis in axes]), packed) for axes, packed in _RARE))


type _Slice = tuple[Packed, int, int, tuple[int, ...]]
"""An array's type, its start and end in the buffer of that type, and its shape."""


@lru_cache(maxsize=64)  # an engine has a dozen shapes
def _lay_out(shape: BatchShape) -> tuple[tuple[_Slice, ...], int, int]:
    """Return the slice of each array in its buffer, and the sizes of the int32 and the float32 buffer."""
    sizes = {"t": shape.bucket.num_tokens, "s": shape.bucket.num_seqs, "m": shape.max_blocks, "2": 2, "3": 3}
    extra = [Packed(np.int32 if isinstance(default, int) else np.float32, default) for _, default in shape.extra_args]
    fields = [
        (field, sizes | own_sizes)
        for _, _, record_fields, own_sizes in _records(shape)
        for field in record_fields
        if field is not None
    ] + [(ArrayField("s", packed), sizes) for packed in extra]
    ends: dict[type, int] = {np.int32: 0, np.float32: 0}
    slices: list[_Slice] = []
    for (axes, packed), lengths in fields:
        dims = tuple([lengths[axis] for axis in axes])
        start = ends[packed.dtype]
        ends[packed.dtype] = end = start + math.prod(dims)
        slices.append((packed, start, end, dims))
    return tuple(slices), ends[np.int32], ends[np.float32]


def _cut(ints: Any, floats: Any, slices: tuple[_Slice, ...]) -> list[Any]:
    buffers = {np.int32: ints, np.float32: floats}
    return [buffers[packed.dtype][start:end].reshape(dims) for packed, start, end, dims in slices]


@lru_cache(maxsize=64)
def _records(shape: BatchShape) -> tuple[tuple[str, type, tuple[ArrayField | None, ...], dict[str, int]], ...]:
    """Return the name of each record with its fields, and the sizes of axes that it has of its own."""
    records = []
    for name, (record, fields) in _RECORDS.items():
        match name:
            case "placements":
                sizes = [{"i": shape.max_tiles(query_tile)} for query_tile in shape.query_tiles]
            case "cross":
                cross = shape.cross
                sizes = [] if cross is None else [{"i": shape.max_tiles(cross.query_tile), "m": cross.max_blocks}]
            case "states":
                sizes = [{}] * shape.has_states
            case "drafted":
                sizes = [{}] * (shape.has_states and shape.max_drafts > 0)
            case "media":
                sizes = [{}] * shape.has_media
            case "steering":
                sizes = [{}] * shape.has_vectors
            case "transcripts":
                sizes = [{}] * (shape.first_timestamp is not None)
            case _:
                sizes = [{}]
        records += [(name, record, fields, own_sizes) for own_sizes in sizes]
    return tuple(records)


def _assemble(arrays: list[Any], shape: BatchShape) -> PackedInputs:
    """Return the records that consist of the arrays, which are in the buffers' order."""
    values, first_extra = iter(arrays), len(arrays) - len(shape.extra_args)
    extra_args = {name: array for (name, _), array in zip(shape.extra_args, arrays[first_extra:], strict=True)}
    made: dict[str, list[Any]] = {name: [] for name in _RECORDS}
    for name, record, fields, _ in _records(shape):
        made[name].append(record(*(extra_args if field is None else next(values) for field in fields)))
    whole: dict[str, Any] = {name: tuple(of) if name in _REPEATED else of[0] for name, of in made.items()}
    return PackedInputs(**whole)

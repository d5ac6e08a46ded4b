"""From a plan to the arrays of a step: two packed host buffers of fixed shape. numpy only.

One table (`int_fields`, `float_fields`) says where each input lies, for the host that fills the buffers and for the
step that reads them: 2 transfers a step instead of 20.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.scheduling.plan import Chunk, StepPlan

from .buckets import Bucket

Fields = tuple[tuple[str, tuple[int, ...]], ...]


class BatchShape(NamedTuple):
    """What fixes the shape of a step's inputs."""

    bucket: Bucket
    max_blocks: int
    """Blocks of the longest request."""
    query_tile: int
    """Rows of a prefill tile."""

    @property
    def max_tiles(self) -> int:
        """The most tiles a step can have: every chunk may leave one part-filled, and has 2 tokens or more."""
        t = self.bucket.num_tokens
        return max(1, min(t // 2, t // self.query_tile + self.bucket.num_seqs))


class StepInputs(NamedTuple):
    """One step on the host, ready to be sent."""

    shape: BatchShape
    ints: np.ndarray
    floats: np.ndarray
    allowed_bits_sw: np.ndarray | None
    """Packed bits, 32 ids a word: which ids each row may sample; None when every row may sample all."""
    is_full: bool
    """Whether some row needs more than the `plain` program does."""
    num_seqs: int


def int_fields(shape: BatchShape) -> Fields:
    """Return name and shape of what the int32 buffer holds, in order."""
    (t, s), m, tiles = shape.bucket, shape.max_blocks, shape.max_tiles
    return (
        ("token_ids", (t,)),
        ("positions", (t,)),
        ("rope_lengths", (t,)),
        ("slots", (t,)),
        ("block_tables", (s, m)),
        ("context_lens", (s,)),
        ("query_ends", (s,)),
        ("tile_seqs", (tiles,)),
        ("tile_rows", (tiles,)),
        ("previous_rows", (s,)),
        ("from_previous", (s,)),
        ("seeds", (s, 2)),
        ("sampled_positions", (s,)),
        ("top_k", (s,)),
        ("num_decodes", ()),
        ("num_tiles", ()),
        ("num_seqs", ()),
    )


def float_fields(shape: BatchShape) -> Fields:
    """Return name and shape of what the float32 buffer holds, in order."""
    s = shape.bucket.num_seqs
    return (("temperature", (s,)), ("top_p", (s,)), ("min_p", (s,)))


def buffer_size(fields: Fields) -> int:
    """Return the number of elements of a packed buffer."""
    return sum(math.prod(shape) for _, shape in fields)


def unpack(buffer: Any, fields: Fields) -> dict[str, Any]:
    """Cut a packed buffer into its fields: views of a numpy buffer, slices of a traced one."""
    views, start = {}, 0
    for name, shape in fields:
        size = math.prod(shape)
        views[name] = buffer[start : start + size].reshape(shape)
        start += size
    return views


def build(plan: StepPlan, shape: BatchShape, block_size: int, vocab_size: int) -> StepInputs:
    """Pad and pack one plan. Buffers are new each time: the device may still be reading the last step's."""
    ints, int_views = _allocate(int_fields(shape), np.int32)
    floats, float_views = _allocate(float_fields(shape), np.float32)
    lengths = np.array([len(chunk.token_ids) for chunk in plan.chunks])
    _fill_sequences(int_views, plan.chunks, lengths)
    _fill_tokens(int_views, plan.chunks, lengths, block_size)
    _fill_tiles(int_views, lengths, shape.query_tile)
    _fill_sampling(int_views, float_views, plan.chunks)
    return StepInputs(
        shape=shape,
        ints=ints,
        floats=floats,
        allowed_bits_sw=_allowed_bits(plan.chunks, shape.bucket.num_seqs, vocab_size),
        is_full=any(needs_full(chunk) for chunk in plan.chunks),
        num_seqs=len(plan.chunks),
    )


def needs_full(chunk: Chunk) -> bool:
    """Say whether a chunk's sampling is beyond greedy, temperature and seed."""
    params = chunk.params
    if not chunk.samples:
        return False
    truncates = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    return truncates or params.logprobs is not None or bool(chunk.banned_token_ids)


def _allocate(fields: Fields, dtype: type) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a new buffer and its fields."""
    # Zeros are right for padding: token 0 at position 0, written to the null block, in sequences of length 0.
    buffer = np.zeros(buffer_size(fields), dtype)
    return buffer, unpack(buffer, fields)


def _fill_sequences(fields: dict[str, np.ndarray], chunks: Sequence[Chunk], lengths: np.ndarray) -> None:
    num_seqs = len(chunks)
    fields["context_lens"][:num_seqs] = lengths + [chunk.start for chunk in chunks]
    fields["query_ends"][:num_seqs] = np.cumsum(lengths)
    fields["query_ends"][num_seqs:] = fields["query_ends"][num_seqs - 1]
    fields["num_decodes"][...] = np.count_nonzero(lengths == 1)
    fields["num_seqs"][...] = num_seqs
    owners, places = _spread(np.array([len(chunk.block_ids) for chunk in chunks]))
    fields["block_tables"][owners, places] = _join([chunk.block_ids for chunk in chunks])
    previous_rows = np.array([-1 if chunk.previous_row is None else chunk.previous_row for chunk in chunks])
    fields["previous_rows"][:num_seqs] = np.maximum(previous_rows, 0)
    fields["from_previous"][:num_seqs] = previous_rows >= 0


def _fill_tokens(fields: dict[str, np.ndarray], chunks: Sequence[Chunk], lengths: np.ndarray, block_size: int) -> None:
    seqs, places = _spread(lengths)
    num_tokens = len(seqs)
    positions = (fields["context_lens"][: len(chunks)] - lengths)[seqs] + places
    blocks = fields["block_tables"][seqs, positions // block_size]
    fields["token_ids"][:num_tokens] = _join([chunk.token_ids for chunk in chunks])
    fields["positions"][:num_tokens] = positions
    fields["slots"][:num_tokens] = blocks * block_size + positions % block_size
    prompt_lens = np.array([chunk.num_prompt_tokens for chunk in chunks])
    fields["rope_lengths"][:num_tokens] = np.maximum(prompt_lens[seqs], positions + 1)


def _fill_tiles(fields: dict[str, np.ndarray], lengths: np.ndarray, query_tile: int) -> None:
    """Cut the chunks of two tokens or more into tiles."""
    seqs, places = _spread(np.where(lengths > 1, -(-lengths // query_tile), 0))
    fields["tile_seqs"][: len(seqs)] = seqs
    fields["tile_rows"][: len(seqs)] = (fields["query_ends"][: len(lengths)] - lengths)[seqs] + places * query_tile
    fields["num_tiles"][...] = len(seqs)


def _fill_sampling(ints: dict[str, np.ndarray], floats: dict[str, np.ndarray], chunks: Sequence[Chunk]) -> None:
    num_seqs = len(chunks)
    params = [chunk.params for chunk in chunks]
    floats["temperature"][:num_seqs] = [p.temperature for p in params]
    floats["top_p"][:num_seqs] = [p.top_p for p in params]
    floats["min_p"][:num_seqs] = [p.min_p for p in params]
    ints["top_k"][:num_seqs] = np.maximum([p.top_k for p in params], 0)  # 0 and -1 are vLLM's two ways to say "all"
    ints["sampled_positions"][:num_seqs] = ints["context_lens"][:num_seqs]
    seeds = np.array([chunk.seed for chunk in chunks], np.dtype("<u8"))
    ints["seeds"][:num_seqs] = seeds.view(np.dtype("<i4")).reshape(num_seqs, 2)[:, ::-1]  # the high word first


def _join(arrays: Sequence[array[int]]) -> np.ndarray:
    """Return int32 arrays end to end; several times faster than np.concatenate, which makes an array of each first."""
    return np.frombuffer(b"".join(arrays), np.int32)


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for items that lie end to end, `counts` of them per owner, each one's owner and its place there."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]


def _allowed_bits(chunks: Sequence[Chunk], num_rows: int, vocab_size: int) -> np.ndarray | None:
    if not any(chunk.banned_token_ids for chunk in chunks):
        return None
    bits_sw = np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)
    for row, chunk in enumerate(chunks):
        for token_id in chunk.banned_token_ids:
            bits_sw[row, token_id // 32] &= np.int32(~np.uint32(1 << token_id % 32).view(np.int32))
    return bits_sw

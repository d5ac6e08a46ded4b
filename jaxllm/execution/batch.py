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

from jaxllm.constraints.bits import RowMask
from jaxllm.scheduling.plan import Chunk, StepPlan

from .buckets import Bucket
from .rows import ExtraArgs, Fields, RareInputs, fill_rare, fill_rows, float_row_fields, int_row_fields, needs_full


class BatchShape(NamedTuple):
    """What fixes the shape of a step's inputs."""

    bucket: Bucket
    max_blocks: int
    """Blocks of the longest request."""
    query_tile: int
    """Rows of a prefill tile."""
    row_alignment: int
    """Chunks of two tokens or more start at a multiple of this row."""
    extra_args: ExtraArgs = ()
    """What the logits processors take."""

    @property
    def max_tiles(self) -> int:
        """The most tiles a step can have: every chunk may leave one part-filled, and takes 2 rows or more."""
        t, s = self.bucket
        num_chunks = min(s, -(-t // max(2, self.row_alignment)))
        return t // self.query_tile + num_chunks


class StepInputs(NamedTuple):
    """One step on the host, ready to be sent."""

    shape: BatchShape
    ints: np.ndarray
    floats: np.ndarray
    rare: RareInputs
    is_full: bool
    """Whether some row needs more than the `plain` program does."""


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
        ("query_starts", (s,)),
        ("query_ends", (s,)),
        ("tile_seqs", (tiles,)),
        ("tile_rows", (tiles,)),
        ("previous_rows", (s,)),
        ("from_previous", (s,)),
        ("num_decodes", ()),
        ("num_tiles", ()),
        *int_row_fields(s, shape.extra_args),
    )


def float_fields(shape: BatchShape) -> Fields:
    """Return name and shape of what the float32 buffer holds, in order."""
    return float_row_fields(shape.bucket.num_seqs, shape.extra_args)


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


def build(
    plan: StepPlan, shape: BatchShape, block_size: int, vocab_size: int, masks: Sequence[RowMask | None]
) -> StepInputs:
    """Pad and pack one plan; `masks` say what each chunk's row may sample, None for everything.

    Buffers are new each time: the device may still be reading the last step's.
    """
    ints, int_views = _allocate(int_fields(shape), np.int32)
    floats, float_views = _allocate(float_fields(shape), np.float32)
    lengths = np.array([len(chunk.token_ids) for chunk in plan.chunks])
    _fill_sequences(int_views, plan.chunks, lengths, first_rows(lengths, shape.row_alignment))
    _fill_tokens(int_views, plan.chunks, lengths, block_size)
    _fill_tiles(int_views, lengths, shape.query_tile)
    fill_rows(int_views, float_views, plan.chunks, shape.extra_args)
    is_full = any(map(needs_full, plan.chunks, masks))
    rare = RareInputs(*[None] * len(RareInputs._fields))
    if is_full:
        rare = fill_rare(int_views, plan.chunks, masks, shape.bucket.num_seqs, vocab_size)
    return StepInputs(shape=shape, ints=ints, floats=floats, rare=rare, is_full=is_full)


def _allocate(fields: Fields, dtype: type) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a new buffer and its fields."""
    # Zeros are right for padding: token 0 at position 0, written to the null block, in sequences of length 0.
    buffer = np.zeros(buffer_size(fields), dtype)
    return buffer, unpack(buffer, fields)


def first_rows(lengths: np.ndarray, alignment: int) -> np.ndarray:
    """Return each chunk's first row among the step's tokens: decodes end to end, then longer chunks, aligned."""
    is_longer = lengths > 1
    num_rows = np.where(is_longer, -(-lengths // alignment) * alignment, 1)
    num_decodes = len(lengths) - np.count_nonzero(is_longer)
    return np.cumsum(num_rows) - num_rows + is_longer * (-num_decodes % alignment)


def count_rows(plan: StepPlan, alignment: int) -> int:
    """Return how many rows of tokens a plan takes."""
    if alignment == 1:
        return plan.num_tokens
    lengths = np.array([len(chunk.token_ids) for chunk in plan.chunks])
    return int(first_rows(lengths, alignment)[-1] + lengths[-1])


def _fill_sequences(
    fields: dict[str, np.ndarray], chunks: Sequence[Chunk], lengths: np.ndarray, starts: np.ndarray
) -> None:
    num_seqs = len(chunks)
    fields["context_lens"][:num_seqs] = lengths + [chunk.start for chunk in chunks]
    fields["query_starts"][:num_seqs] = starts
    fields["query_ends"][:num_seqs] = starts + lengths
    for name in ("query_starts", "query_ends"):
        fields[name][num_seqs:] = fields["query_ends"][num_seqs - 1]
    fields["num_decodes"][...] = np.count_nonzero(lengths == 1)
    owners, places = _spread(np.array([len(chunk.block_ids) for chunk in chunks]))
    fields["block_tables"][owners, places] = _join([chunk.block_ids for chunk in chunks])
    previous_rows = np.array([-1 if chunk.previous_row is None else chunk.previous_row for chunk in chunks])
    fields["previous_rows"][:num_seqs] = np.maximum(previous_rows, 0)
    fields["from_previous"][:num_seqs] = previous_rows >= 0


def _fill_tokens(fields: dict[str, np.ndarray], chunks: Sequence[Chunk], lengths: np.ndarray, block_size: int) -> None:
    seqs, places = _spread(lengths)
    rows = fields["query_starts"][seqs] + places
    positions = (fields["context_lens"][: len(chunks)] - lengths)[seqs] + places
    blocks = fields["block_tables"][seqs, positions // block_size]
    fields["token_ids"][rows] = _join([chunk.token_ids for chunk in chunks])
    fields["positions"][rows] = positions
    fields["slots"][rows] = blocks * block_size + positions % block_size
    prompt_lens = np.array([chunk.num_prompt_tokens for chunk in chunks])
    fields["rope_lengths"][rows] = np.maximum(prompt_lens[seqs], positions + 1)


def _fill_tiles(fields: dict[str, np.ndarray], lengths: np.ndarray, query_tile: int) -> None:
    """Cut the chunks of two tokens or more into tiles."""
    seqs, places = _spread(np.where(lengths > 1, -(-lengths // query_tile), 0))
    fields["tile_seqs"][: len(seqs)] = seqs
    fields["tile_rows"][: len(seqs)] = fields["query_starts"][seqs] + places * query_tile
    fields["num_tiles"][...] = len(seqs)


def _join(arrays: Sequence[array[int]]) -> np.ndarray:
    """Return int32 arrays end to end; several times faster than np.concatenate, which makes an array of each first."""
    return np.frombuffer(b"".join(arrays), np.int32)


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for items that lie end to end, `counts` of them per owner, each one's owner and its place there."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]

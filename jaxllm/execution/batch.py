"""Pack a step's plan into two host buffers of fixed shape. numpy only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.constraints.bits import RowMask
from jaxllm.execution.kept_rows import RowSettings, to_int32
from jaxllm.execution.packing import (
    BufferPool,
    CrossShape,
    DraftPlaces,
    PackedInputs,
    Placement,
    Sequences,
    StatePlaces,
    StepBuffers,
    rare_specs,
)
from jaxllm.execution.rows import fill_rare, fill_rows, fill_transcripts
from jaxllm.models.inputs import MediaTokens
from jaxllm.sampling.inputs import RareRules
from jaxllm.scheduling.plan import Chunk, Owner, StepKind, StepPlan


class StepInputs(NamedTuple):
    """The inputs of one step on the host, ready to be sent."""

    buffers: StepBuffers
    rare: RareRules
    """The fields of arrays that no row needs are None."""
    owners: Sequence[Owner] | None
    """The owners of the step's rows if the next step may be made from these inputs; else None."""


def build(
    plan: StepPlan,
    buffers: StepBuffers,
    block_size: int,
    vocab_size: int,
    masks: Sequence[RowMask | None],
    settings: RowSettings,
) -> StepInputs:
    """Pad and pack one plan into buffers that have neutral values.

    `masks` has the token ids that each row may sample, None for all. `settings` are those of the plan's chunks.
    """
    shape, _, _, inputs = buffers
    lengths = _lengths(plan)
    starts = to_int32([*plan.decodes.starts, *[chunk.start for chunk in plan.others]])
    _fill_sequences(inputs, plan, lengths, first_rows(lengths, shape.row_alignment))
    rows, seqs, positions = _fill_tokens(inputs, plan, lengths, starts, settings)
    for tokens in inputs.media:
        _fill_media(tokens, plan.chunks, rows, seqs, positions)
    ends, places, offsets = starts + lengths, positions // block_size, positions % block_size
    of_groups = zip(inputs.placements, shape.query_tiles, shape.attention_chunks, strict=True)
    for group, (placement, query_tile, attention_chunk) in enumerate(of_groups):
        own_ends, own_places = ends, places
        if attention_chunk is None:
            placement.block_tables_sm[: len(ends)] = settings.tables[group][settings.slots_s]
        else:
            # Attention begins with the chunk: blocks before it are cut off the table, and their tokens do not count.
            firsts = starts // attention_chunk * (attention_chunk // block_size)
            all_ids = zip([chunk.block_ids[group] for chunk in plan.chunks], firsts.tolist(), strict=True)
            _fill_blocks(placement, [ids[first:] for ids, first in all_ids])
            own_ends, own_places = ends - firsts * block_size, places - firsts[seqs]
        placement.context_lens_s[: len(ends)] = own_ends
        placement.slots_t[rows] = placement.block_tables_sm[seqs, own_places] * block_size + offsets
        _fill_tiles(placement, inputs.sequences, lengths, query_tile)
    for placement in inputs.cross:
        assert shape.cross is not None
        placement.block_tables_sm[: len(ends)] = settings.tables[-1][settings.slots_s]
        _fill_cross(placement, shape.cross, rows, seqs, positions - ends[seqs], block_size)
        placement.context_lens_s[: len(ends)] = shape.cross.num_frames
        _fill_tiles(placement, inputs.sequences, lengths, shape.cross.query_tile)
    for states in inputs.states:
        _fill_states(states, inputs.sequences, plan.chunks, ends)
    for drafted in inputs.drafted:
        _fill_drafted(drafted, inputs.sequences, plan.chunks)
    fill_rows(inputs, plan, settings, ends)
    fill_transcripts(inputs, plan, shape.first_timestamp)
    specs = rare_specs(shape.bucket.num_seqs, vocab_size, shape.max_drafts)
    rare = fill_rare(inputs.uses, plan, settings, masks, specs)
    # `build_next` knows what differs in decodes of text whose tables begin with their first block.
    has_more = plan.others or shape.has_states or shape.has_media or any(shape.attention_chunks)
    is_masked = masks.count(None) < len(masks)
    return StepInputs(buffers, rare, None if has_more or is_masked else plan.decodes.owners)


def is_next(plan: StepPlan, last: StepInputs, masks: Sequence[RowMask | None]) -> bool:
    """Return whether a step has the rows of the last one, one token later, and nothing more."""
    return plan.decodes.owners is last.owners and not plan.others and masks.count(None) == len(masks)


def build_next(plan: StepPlan, last: StepInputs, block_size: int, pool: BufferPool) -> StepInputs:
    """Return the inputs of a step for which `is_next` holds, made from the last step's: most are the same."""
    decodes, num_seqs = plan.decodes, plan.num_chunks
    buffers = pool.copy(last.buffers)
    inputs = buffers.records
    inputs.tokens.token_ids_t[:num_seqs] = to_int32(decodes.token_ids) if decodes.token_ids else 0
    inputs.logit_rows.previous_rows_s[:num_seqs] = to_int32(decodes.previous_rows) if decodes.previous_rows else -1
    positions_t = np.asarray(inputs.tokens.positions_t)[:num_seqs]
    grow_by_one = [positions_t, inputs.tokens.rope_lengths_t, inputs.sampling.positions_s, inputs.rules.num_outputs_s]
    for placement in inputs.placements:
        grow_by_one += [placement.context_lens_s, placement.slots_t]
    for numbers in grow_by_one:
        np.asarray(numbers)[:num_seqs] += 1
    places, offsets = np.divmod(positions_t, block_size)
    moved = np.flatnonzero(offsets == 0)  # a token within a block has the slot behind the last one's
    for group, placement in enumerate(inputs.placements):
        for row in decodes.changed:
            ids = decodes.block_ids[row][group]
            placement.block_tables_sm[row, : len(ids)] = ids
            placement.block_tables_sm[row, len(ids) :] = 0
        blocks = placement.block_tables_sm[moved, places[moved]]
        placement.slots_t[moved] = blocks * block_size + offsets[moved]
    fill_transcripts(inputs, plan, buffers.shape.first_timestamp)
    return last._replace(buffers=buffers)


def first_rows(lengths: np.ndarray, alignment: int) -> np.ndarray:
    """Return each chunk's first row among the step's tokens: decodes end to end, then longer chunks, aligned."""
    is_longer = lengths > 1
    num_rows = np.where(is_longer, -(-lengths // alignment) * alignment, 1)
    num_decodes = len(lengths) - np.count_nonzero(is_longer)
    return np.cumsum(num_rows) - num_rows + is_longer * (-num_decodes % alignment)


def _lengths(plan: StepPlan) -> np.ndarray:
    """Return the number of tokens of each chunk."""
    if plan.decodes_only:
        return np.ones(plan.num_chunks, np.int32)
    return to_int32([*[1] * len(plan.decodes.starts), *[len(chunk.token_ids) for chunk in plan.others]])


def num_token_rows(plan: StepPlan, alignment: int) -> int:
    """Return the number of rows of tokens that a plan takes."""
    if alignment == 1 or plan.decodes_only:
        return plan.num_tokens
    lengths = _lengths(plan)
    return int(first_rows(lengths, alignment)[-1] + lengths[-1])


def _fill_sequences(inputs: PackedInputs, plan: StepPlan, lengths: np.ndarray, starts: np.ndarray) -> None:
    num_seqs, sequences = plan.num_chunks, inputs.sequences
    sequences.query_starts_s[:num_seqs] = starts
    sequences.query_ends_s[:num_seqs] = starts + lengths
    for rows_s in (sequences.query_starts_s, sequences.query_ends_s):
        rows_s[num_seqs:] = sequences.query_ends_s[num_seqs - 1]
    sequences.num_decodes[...] = np.count_nonzero(lengths == 1)
    before = plan.decodes.previous_rows or [-1] * len(plan.decodes.starts)
    previous = [-1 if (row := chunk.previous_row) is None else row for chunk in plan.others]
    inputs.logit_rows.previous_rows_s[:num_seqs] = to_int32([*before, *previous])


def _fill_tokens(
    inputs: PackedInputs, plan: StepPlan, lengths: np.ndarray, starts: np.ndarray, settings: RowSettings
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill the records of tokens, their adapters and their steering; return each token's row, sequence and position."""
    tokens, sequences = inputs.tokens, inputs.sequences
    seqs, places = _spread(lengths)
    rows = np.asarray(sequences.query_starts_s)[seqs] + places
    positions = starts[seqs] + places
    known = array("i", plan.decodes.token_ids or bytes(4 * len(plan.decodes.starts)))
    tokens.token_ids_t[rows] = _join([known, *[chunk.token_ids for chunk in plan.others]])
    tokens.positions_t[rows] = positions
    tokens.rope_lengths_t[rows] = np.maximum(settings.prompt_lens_s[seqs], positions + 1)
    for steering in inputs.steering:
        steering.vectors_t[rows] = settings.vectors_s[seqs]
        steering.scales_t[rows] = settings.vector_scales_s[seqs]
    if plan.has_adapters:
        tokens.adapter_slots_t[rows] = settings.adapter_slots_s[seqs]
    if plan.kind is not StepKind.SAMPLE:  # mark the tokens of pairs' second texts
        tokens.type_ids_t[rows] = positions >= settings.pair_starts_s[seqs]
    return rows, seqs, positions


def _fill_media(
    tokens: MediaTokens, chunks: Sequence[Chunk], rows: np.ndarray, seqs: np.ndarray, positions: np.ndarray
) -> None:
    """Fill in what tokens take from media; those of most chunks take nothing."""
    offsets = np.array([0 if chunk.media is None else chunk.media.rope_offset for chunk in chunks])
    rope_positions, media_rows, ends = positions + offsets[seqs], np.full(len(rows), -1), positions + 1
    rope_positions = np.repeat(rope_positions[:, None], 3, axis=1)
    first = 0
    for chunk in chunks:
        media = chunk.media
        if media is not None:
            # Drafts come after all that media say.
            if media.rows is not None:
                media_rows[first : first + len(media.rows)] = media.rows
            if media.ends is not None:
                ends[first : first + len(media.ends)] = media.ends
            of_prompt = np.frombuffer(media.rope_positions, np.int32).reshape(-1, 3)
            rope_positions[first : first + len(of_prompt)] = of_prompt
        first += len(chunk.token_ids)
    tokens.media_rows_t[rows], tokens.media_ends_t[rows] = media_rows, ends
    tokens.rope_positions_t3[rows] = rope_positions


def _fill_cross(
    placement: Placement, cross: CrossShape, rows: np.ndarray, seqs: np.ndarray, from_ends: np.ndarray, block_size: int
) -> None:
    """Let each token stand for a frame: the last token of a chunk for the last one. `from_ends` are below 0."""
    places, offsets = np.divmod(cross.num_frames + from_ends, block_size)
    placement.slots_t[rows] = placement.block_tables_sm[seqs, places] * block_size + offsets


def _fill_blocks(placement: Placement, block_ids: Sequence[array[int]]) -> None:
    owners, places = _spread(np.array([len(each) for each in block_ids]))
    placement.block_tables_sm[owners, places] = _join(block_ids)


def _fill_tiles(placement: Placement, sequences: Sequences, lengths: np.ndarray, query_tile: int) -> None:
    """Cut the chunks of two tokens or more, if there are any, into tiles."""
    if lengths[-1] == 1:
        return
    seqs, places = _spread(np.where(lengths > 1, -(-lengths // query_tile), 0))
    placement.tile_seqs_i[: len(seqs)] = seqs
    placement.tile_rows_i[: len(seqs)] = sequences.query_starts_s[seqs] + places * query_tile
    placement.num_tiles[...] = len(seqs)


def _fill_states(states: StatePlaces, sequences: Sequences, chunks: Sequence[Chunk], ends: np.ndarray) -> None:
    num_seqs, of_chunks = len(chunks), [chunk.state_slots for chunk in chunks]
    states.read_slots_s[:num_seqs] = [slots.read for slots in of_chunks]
    states.write_slots_s[:num_seqs] = [slots.write for slots in of_chunks]
    states.save_slots_s[:num_seqs] = [slots.save for slots in of_chunks]
    saved = np.array([slots.save_at for slots in of_chunks]) - ends  # from the chunk's end on
    states.save_ends_s[:num_seqs] = np.asarray(sequences.query_ends_s)[:num_seqs] + saved


def _fill_drafted(drafted: DraftPlaces, sequences: Sequences, chunks: Sequence[Chunk]) -> None:
    for first, chunk in zip(sequences.query_starts_s, chunks, strict=False):
        slots = chunk.state_slots.drafted
        drafted.row_slots_t[first : first + len(slots)] = slots


def _join(arrays: Sequence[array[int]]) -> np.ndarray:
    """Join int32 arrays; several times faster than np.concatenate, which first converts each of them."""
    return np.frombuffer(b"".join(arrays), np.int32)


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the owner of each item, and its index among its owner's items, where owner i has `counts[i]` items."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]

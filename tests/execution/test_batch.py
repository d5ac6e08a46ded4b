"""Plans become padded arrays, equal to those of a plain loop over tokens."""

import itertools
import random
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.constraints.bits import RowMask
from jaxllm.execution.batch import build, num_token_rows
from jaxllm.execution.kept_rows import KeptRows
from jaxllm.execution.packing import (
    BatchShape,
    Bucket,
    BufferPool,
    CrossShape,
    allocate,
    make_buckets,
    pick_bucket,
    unpack,
)
from jaxllm.execution.rows import least_sampling
from jaxllm.sampling.inputs import Sampling
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.media import ChunkMedia
from jaxllm.scheduling.plan import Chunk, Owner, StepPlan

BLOCK_SIZE = 4


def make_chunk(request_id: str, start: int, ids: list[int], blocks: list[int], **kwargs: Any) -> Chunk:
    chunk = Chunk(
        owner=Owner(request_id=request_id, num_prompt_tokens=start + len(ids), params=SamplingParams(), seed=0),
        start=start,
        token_ids=array("i", ids),
        previous_row=None,
        block_ids=(array("i", blocks),),
        samples=True,
        num_output_tokens=0,
    )
    owned = {name: kwargs.pop(name) for name in Owner.__struct_fields__ if name in kwargs}
    return msgspec.structs.replace(chunk, owner=msgspec.structs.replace(chunk.owner, **owned), **kwargs)


def step(
    *chunks: Chunk,
    bucket: tuple[int, int] = (16, 8),
    query_tile: int = 4,
    row_alignment: int = 1,
    masks: dict[int, RowMask] | None = None,
    extra_args: Any = (),
    attention_chunks: tuple[int | None, ...] = (None,),
    has_media: bool = False,
    cross: CrossShape | None = None,
):
    tiles, others = (query_tile,) * len(attention_chunks), {"has_media": has_media, "cross": cross}
    shape = BatchShape(Bucket(*bucket), 6, tiles, attention_chunks, row_alignment, extra_args, **others)
    plan = StepPlan(step_id=0, others=chunks, num_preempted=0)
    settings = KeptRows(len(chunks), len(attention_chunks), shape.max_blocks, cross.max_blocks if cross else 0).take(
        plan
    )
    of_rows = [(masks or {}).get(row) for row in range(plan.num_rows)]
    inputs = build(plan, allocate(shape), BLOCK_SIZE, 70, of_rows, settings)
    return inputs, unpack(inputs.buffers.ints, inputs.buffers.floats, shape)


def test_tokens_stand_for_the_last_frames_of_their_clips() -> None:
    first, second = array("i", [5, 2, 9]), array("i", [1, 7, 3])
    _, arrays = step(
        make_chunk("a", 9, [50], [3, 1, 7], clip_blocks=first),
        make_chunk("b", 0, [51, 52, 53], [4], clip_blocks=second),
        make_chunk("c", 0, [54, 55], [6], clip_blocks=first),
        cross=CrossShape(num_frames=10, max_blocks=3, query_tile=2),
    )
    [cross] = arrays.cross
    assert cross.block_tables_sm[:4].tolist() == [list(first), list(second), list(first), [0, 0, 0]]
    assert cross.context_lens_s[:4].tolist() == [10, 10, 10, 0]
    # Blocks have 4 slots: the last frame, the 9th from 0, is in the second slot of a clip's last block.
    assert cross.slots_t[:7].tolist() == [37, 31, 12, 13, 36, 37, 0]
    assert arrays.placements[0].context_lens_s[:4].tolist() == [10, 3, 2, 0]
    assert int(cross.num_tiles) == 3
    assert cross.tile_seqs_i[:3].tolist() == [1, 1, 2]
    assert cross.tile_rows_i[:3].tolist() == [1, 3, 4]
    assert len(arrays.batches(decodes_only=False)) == 2


def test_tokens_lie_end_to_end_and_padding_is_neutral() -> None:
    _, arrays = step(
        make_chunk("a", 9, [50], [3, 1, 7], num_prompt_tokens=4),
        make_chunk("b", 2, [60, 61, 62, 63, 64, 65], [2, 9], num_prompt_tokens=20, samples=False),
    )
    np.testing.assert_array_equal(arrays.tokens.token_ids_t, [50, 60, 61, 62, 63, 64, 65] + [0] * 9)
    np.testing.assert_array_equal(arrays.tokens.positions_t, [9, 2, 3, 4, 5, 6, 7] + [0] * 9)
    np.testing.assert_array_equal(arrays.tokens.rope_lengths_t, [10] + [20] * 6 + [0] * 9)
    np.testing.assert_array_equal(
        arrays.placements[0].slots_t, [7 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 36, 37, 38, 39] + [0] * 9
    )
    np.testing.assert_array_equal(arrays.placements[0].context_lens_s, [10, 8] + [0] * 6)
    np.testing.assert_array_equal(arrays.sequences.query_starts_s, [0, 1] + [7] * 6)
    np.testing.assert_array_equal(arrays.sequences.query_ends_s, [1] + [7] * 7)
    np.testing.assert_array_equal(arrays.placements[0].block_tables_sm[:2], [[3, 1, 7, 0, 0, 0], [2, 9, 0, 0, 0, 0]])
    assert not arrays.placements[0].block_tables_sm[2:].any()
    assert (arrays.sequences.num_decodes, arrays.logit_rows.num_rows, arrays.placements[0].num_tiles) == (1, 2, 2)
    np.testing.assert_array_equal(arrays.placements[0].tile_seqs_i[:2], [1, 1])
    np.testing.assert_array_equal(arrays.placements[0].tile_rows_i[:2], [1, 5])


def test_tokens_take_rows_ends_and_positions_from_media() -> None:
    of_prompt = np.array([[3, 3, 3], [4, 5, 6], [4, 6, 7]], np.int32)
    seen = ChunkMedia(array("i", [-1, 30, 31]), array("i", [4, 6, 6]), of_prompt.tobytes(), -2)
    _, arrays = step(
        make_chunk("decode", 9, [50], [3, 1, 7], media=ChunkMedia(rope_offset=-4)),
        make_chunk("text", 2, [60, 61], [2], samples=False),
        make_chunk("seen", 3, [62, 48, 48], [4, 5], media=seen),
        # The last two are outputs in the first case, drafts in the second: both come after the prompt.
        make_chunk("again", 3, [62, 48, 48, 63, 64], [4, 5], media=ChunkMedia(None, None, seen.rope_positions, -2)),
        make_chunk(
            "drafts", 5, [48, 65, 66], [4, 5], num_drafts=2, media=ChunkMedia(array("i", [31]), array("i", [6]))
        ),
        row_alignment=4,
        bucket=(24, 8),
        has_media=True,
    )
    (media,) = arrays.media
    rows, ends, positions = np.full(24, -1), np.zeros(24, int), np.zeros((24, 3), int)
    rows[[9, 10, 20]] = 30, 31, 31
    ends[0], ends[4:6], ends[8:11], ends[12:17], ends[20:23] = 10, [3, 4], [4, 6, 6], [4, 5, 6, 7, 8], [6, 7, 8]
    positions[0], positions[4:6] = 5, [[2] * 3, [3] * 3]
    positions[8:11] = positions[12:15] = of_prompt
    positions[15:17], positions[20:23] = [[4] * 3, [5] * 3], [[5] * 3, [6] * 3, [7] * 3]
    is_used = ends > 0
    np.testing.assert_array_equal(media.media_rows_t[is_used], rows[is_used])
    np.testing.assert_array_equal(media.media_ends_t[is_used], ends[is_used])
    np.testing.assert_array_equal(media.rope_positions_t3[is_used], positions[is_used])
    np.testing.assert_array_equal(arrays.tokens.positions_t[is_used], [9, 2, 3, 3, 4, 5, 3, 4, 5, 6, 7, 5, 6, 7])


def test_a_step_without_pictures_takes_none() -> None:
    _, arrays = step(make_chunk("a", 2, [60, 61], [2]), make_chunk("b", 1, [60, 61], [3]), has_media=True)
    np.testing.assert_array_equal(arrays.media[0].media_rows_t[:4], [-1] * 4)
    np.testing.assert_array_equal(arrays.media[0].media_ends_t[:4], [3, 4, 2, 3])
    np.testing.assert_array_equal(arrays.media[0].rope_positions_t3[:4].T, [[2, 3, 1, 2]] * 3)
    _, arrays = step(make_chunk("a", 2, [60, 61], [2]))
    assert not arrays.media


def test_a_row_in_flight_points_at_its_row() -> None:
    _, arrays = step(
        make_chunk("a", 4, [0], [1, 2], previous_row=5),
        make_chunk("b", 4, [9], [3, 4]),
        make_chunk("c", 5, [0], [5, 6], previous_row=0),
    )
    np.testing.assert_array_equal(arrays.logit_rows.previous_rows_s, [5, -1, 0] + [-1] * 5)


def test_sampling_settings() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)
    inputs, arrays = step(
        make_chunk("a", 3, [1], [1], params=params, seed=2**64 - 2), make_chunk("b", 0, [1, 2], [2], seed=5)
    )
    np.testing.assert_array_equal(arrays.sampling.seeds_s2[:2].view(np.uint32), [[2**32 - 1, 2**32 - 2], [0, 5]])
    np.testing.assert_array_equal(arrays.sampling.positions_s[:2], [4, 2])
    assert arrays.sampling.top_k_s[0] == 7
    floats = (arrays.sampling.temperature_s, arrays.sampling.top_p_s, arrays.sampling.min_p_s)
    assert [values_s[0] for values_s in floats] == pytest.approx([0.5, 0.9, 0.1])
    assert inputs.rare == (None,) * len(inputs.rare)


NEEDS: list[tuple[dict[str, Any], Sampling]] = [
    ({}, Sampling.PLAIN),
    ({"params": SamplingParams(temperature=0.0)}, Sampling.PLAIN),
    ({"params": SamplingParams(seed=3)}, Sampling.PLAIN),
    ({"params": SamplingParams(temperature=0.0, top_k=5, top_p=0.5)}, Sampling.PLAIN),
    ({"params": SamplingParams(top_k=5), "samples": False}, Sampling.PLAIN),
    ({"params": SamplingParams(logprobs=5), "samples": False}, Sampling.PLAIN),
    ({"count_row": 1, "samples": False}, Sampling.PLAIN),
    ({"params": SamplingParams(top_k=5)}, Sampling.TRUNCATED),
    ({"params": SamplingParams(top_p=0.5)}, Sampling.TRUNCATED),
    ({"params": SamplingParams(min_p=0.5)}, Sampling.TRUNCATED),
    ({"params": SamplingParams(logprobs=0)}, Sampling.FULL),
    ({"params": SamplingParams(top_k=5, logprobs=0)}, Sampling.FULL),
    ({"count_row": 1}, Sampling.FULL),
    ({"params": SamplingParams(logit_bias={3: 1.0})}, Sampling.FULL),
    ({"params": SamplingParams(logprob_token_ids=[3])}, Sampling.FULL),
    ({"scored_ids": array("i", [7]), "samples": False}, Sampling.FULL),
]


def least(chunks: list[Chunk], masks: list[RowMask | None]) -> Sampling:
    plan = StepPlan(step_id=0, others=tuple(chunks), num_preempted=0)
    return least_sampling(plan, KeptRows(len(chunks), 1, 6).take(plan), masks)


@pytest.mark.parametrize(("kwargs", "sampling"), NEEDS)
def test_a_step_runs_the_least_program_that_a_row_needs(kwargs: dict[str, Any], sampling: Sampling) -> None:
    assert least([make_chunk("a", 0, [1], [1], **kwargs)], [None]) is sampling


def test_the_row_that_needs_most_decides() -> None:
    for (first, one), (second, other) in itertools.product(NEEDS, NEEDS):
        chunks = [make_chunk(name, 0, [1], [1], **settings) for name, settings in (("a", first), ("b", second))]
        assert least(chunks, [None] * 2) is max(one, other, key=list(Sampling).index)


def test_a_mask_makes_a_step_full_and_reaches_its_row() -> None:
    bits_w, grammar_w = np.array([[5, -7, 3], [7, -5, 3]], np.int32)
    mask = RowMask(bits_w, grammar_w)
    chunks = [make_chunk("a", 0, [1], [1]), make_chunk("b", 0, [1], [2])]
    assert least(chunks, [None, mask]) is Sampling.FULL
    inputs, _ = step(*chunks, masks={1: mask})
    np.testing.assert_array_equal(inputs.rare.allowed_bits_sw[:3], [[-1] * 3, bits_w, [-1] * 3])
    assert inputs.rare.grammar_bits_sw is None, "for log-probabilities only"
    shown = SamplingParams(logprobs=0)
    chunks = [make_chunk(name, 0, [1], [1 + at], params=shown) for at, name in enumerate("ab")]
    inputs, _ = step(*chunks, masks={0: RowMask(bits_w, None), 1: mask})
    np.testing.assert_array_equal(inputs.rare.grammar_bits_sw[:3], [[-1] * 3, grammar_w, [-1] * 3])
    rare = step(make_chunk("a", 0, [1], [1]))[0].rare
    assert rare.allowed_bits_sw is rare.grammar_bits_sw is None


@pytest.mark.parametrize("alignment", [1, 16])
def test_random_plans_equal_a_loop(alignment: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = sorted(rng.integers(1, 9, rng.integers(1, 6)).tolist(), key=lambda size: size > 1)
        chunks, expected, covered = [], {}, []
        for size in sizes:
            start = int(rng.integers(0, 12))
            blocks = rng.permutation(np.arange(1, 40))[: -(-(start + size) // BLOCK_SIZE)].tolist()
            ids = rng.integers(0, 70, size).tolist()
            chunks.append(make_chunk(str(len(chunks)), start, ids, blocks))
            row = 1 + max(expected, default=-1)
            row = row if size == 1 else -(-row // alignment) * alignment
            for index, (position, token_id) in enumerate(enumerate(ids, start)):
                slot = blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                expected[row + index] = (token_id, position, slot)
            covered += list(range(row, row + size)) if size > 1 else []
        _, arrays = step(*chunks, bucket=(128, 8), query_tile=3, row_alignment=alignment)
        plan = StepPlan(step_id=0, others=tuple(chunks), num_preempted=0)
        assert num_token_rows(plan, alignment) == max(expected) + 1
        tokens, attention = arrays.tokens, arrays.placements[0].batch(arrays.sequences)
        got = np.stack([tokens.token_ids_t, tokens.positions_t, attention.slots_t], axis=1)
        assert got.tolist() == [list(expected.get(row, (0, 0, 0))) for row in range(128)]
        rows = np.stack([attention.tile_seqs_i, attention.tile_rows_i], axis=1)[: attention.num_tiles].tolist()
        ends = attention.query_ends_s.tolist()
        assert covered == [row for seq, first in rows for row in range(first, min(first + 3, ends[seq]))]


def test_a_token_attends_from_its_chunks_beginning_to_itself() -> None:
    rng, size = np.random.default_rng(0), 8
    for _ in range(50):
        chunks, tables = [], []
        for length in sorted(rng.integers(1, size + 1, 5).tolist(), key=lambda length: length > 1):
            start = int(rng.integers(0, 3)) * size + int(rng.integers(0, size - length + 1))
            blocks = rng.permutation(np.arange(1, 40))[: -(-(start + length) // BLOCK_SIZE)].tolist()
            behind = start // size * size // BLOCK_SIZE
            tables.append((blocks, [0] * behind + blocks[behind:]))
            of_groups = tuple(array("i", blocks) for blocks in tables[-1])
            chunks.append(make_chunk(str(len(chunks)), start, [7] * length, [], block_ids=of_groups))
        _, arrays = step(*chunks, bucket=(64, 8), attention_chunks=(None, size))
        for group, placement in enumerate(arrays.placements):
            batch = placement.batch(arrays.sequences)
            for seq, chunk in enumerate(chunks):
                of_seq = [block * BLOCK_SIZE + i for block in tables[seq][group] for i in range(BLOCK_SIZE)]
                shown = [block * BLOCK_SIZE + i for block in batch.block_tables_sm[seq] for i in range(BLOCK_SIZE)]
                first_row, end_row = batch.query_starts_s[seq], batch.query_ends_s[seq]
                for position, row in enumerate(range(first_row, end_row), chunk.start):
                    num_seen = batch.context_lens_s[seq] - (end_row - 1 - row)
                    first = position // size * size if group else 0
                    assert shown[:num_seen] == of_seq[first : position + 1]
                    assert batch.slots_t[row] == of_seq[position]
                    assert arrays.tokens.positions_t[row] == position
                assert arrays.sampling.positions_s[seq] == chunk.start + len(chunk.token_ids)


@pytest.mark.parametrize("least", [4, 8, 16])
@pytest.mark.parametrize(("tokens", "seqs"), [(512, 256), (8, 4), (1, 1), (100, 7), (2048, 256), (24, 300)])
def test_buckets_cover_every_step(tokens: int, seqs: int, least: int) -> None:
    buckets = make_buckets(tokens, seqs, least)
    assert buckets[0].num_tokens == least
    assert buckets[-1].num_tokens == max(least, -(-tokens // least) * least)
    for num_tokens in range(1, tokens + 1):
        num_seqs = min(num_tokens, seqs)
        bucket = pick_bucket(buckets, num_tokens, num_seqs)
        assert bucket.num_tokens >= num_tokens
        assert bucket.num_seqs >= num_seqs
        assert bucket.num_tokens <= max(least, 2 * num_tokens - 1)
    with pytest.raises(ValueError, match="larger than any"):
        pick_bucket(buckets, buckets[-1].num_tokens + 1, 1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [(512, 64)]),
        ([16], [(16, 16), (512, 64)]),
        ([64, 8, 1, 3, 64], [(8, 8), (64, 64), (512, 64)]),
        ([60, 512, 513, 4096], [(64, 64), (512, 64)]),
    ],
)
def test_buckets_of_sizes(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    assert make_buckets(512, 64, 8, sizes) == tuple(Bucket(*each) for each in expected)


def test_few_programs_by_default() -> None:
    assert len(make_buckets(512, 256, 8)) == 7
    assert [size for size, _ in make_buckets(8192, 1024, 8, halves=True) if size & (size - 1)] == [384, 768, 1536]
    assert [size for size, _ in make_buckets(512, 256, 8, halves=True)][-3:] == [256, 384, 512]
    assert len(make_buckets(512, 256, 4)) == 8


def test_buffers_are_used_again_when_a_later_step_has_ended() -> None:
    shapes = [BatchShape(Bucket(16, num_seqs), 6, (4,), (None,), 1) for num_seqs in (8, 16)]
    pool, neutral = BufferPool(), [allocate(shape) for shape in shapes]
    rng, running, num_again, seen = random.Random(0), [], 0, []
    for _ in range(200):
        index = rng.randrange(2)
        taken = pool.take(shapes[index])
        np.testing.assert_array_equal(taken.ints, neutral[index].ints)
        np.testing.assert_array_equal(taken.floats, neutral[index].floats)
        assert all(taken is not buffers for buffers in running), "a device may still read it"
        num_again += any(taken is buffers for buffers in seen)
        seen.append(taken)
        taken.ints[:], taken.floats[:] = 5, 7
        np.testing.assert_array_equal(pool.copy(taken).ints, taken.ints)
        running.append(taken)
        while len(running) > rng.randrange(1, 4):
            pool.end(running[1])
            del running[0]
    assert num_again > 80

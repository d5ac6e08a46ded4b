"""The splits of decode rows are right, and even for the thread blocks that take them in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch
from pallas_kernels.paged_attention.gpu.decode import WORKERS
from pallas_kernels.paged_attention.gpu.splits import SplitRule, decode_work, split_rule

pytestmark = pytest.mark.kernels
TILE = 128
# The cost of an item besides its tiles, in tiles.
CHANGEOVER = 0.5


def batch_of(lengths: Sequence[int], num_decodes: int) -> AttentionBatch:
    nothing = jnp.zeros(0, jnp.int32)
    fields = dict.fromkeys(AttentionBatch._fields, nothing)
    return AttentionBatch(
        **fields | {"context_lens_s": jnp.asarray(lengths, jnp.int32), "num_decodes": jnp.int32(num_decodes)}
    )


@pytest.mark.parametrize("rule", [SplitRule(1, 1), SplitRule(3, 1), SplitRule(5, 4), SplitRule(132, 2)])
@pytest.mark.parametrize("window", [1, 129, 1000, NO_WINDOW])
def test_splits_are_each_rows_window_in_order_and_once(rule: SplitRule, window: int) -> None:
    rng = np.random.default_rng(window)
    max_context = 6000
    lengths = [1, TILE, TILE + 1, max_context, *rng.integers(1, max_context, 12).tolist()]
    num_decodes = 14
    batch = batch_of([*lengths, 0, 0], num_decodes)
    work = decode_work(batch, rule, TILE, window, max_context)
    seqs, starts, ends, lows, firsts, lasts = map(np.asarray, work)
    assert firsts[0] == 0
    assert lasts[-1] <= len(seqs), "there is room for all"
    np.testing.assert_array_equal(firsts[1:], lasts[:-1])
    np.testing.assert_array_equal(firsts[num_decodes:], lasts[num_decodes:], "other rows have no splits")
    for row in range(num_decodes):
        assert lows[row] == max(lengths[row] - window, 0)
        entries = slice(firsts[row], lasts[row])
        assert set(seqs[entries]) == {row}
        bounds = [*starts[entries].tolist(), int(ends[entries][-1])]
        np.testing.assert_array_equal(bounds[1:], ends[entries])
        assert bounds[0] == lows[row] // TILE * TILE
        assert bounds[-1] == lengths[row]
        sizes = {b - a for a, b in pairwise(bounds[:-1])}
        assert len(sizes) <= 1, "all but the last are of one length"
        assert all(size % TILE == 0 and size >= rule.least_tiles * TILE for size in sizes)
        assert len(bounds) - 1 <= rule.most


def test_a_row_is_cut_the_same_in_every_batch() -> None:
    rule = SplitRule(16, 2)
    _, starts, ends, *_, lasts = decode_work(batch_of([5000, 37, 3111], 3), rule, TILE, NO_WINDOW, 8192)
    alone = decode_work(batch_of([3111], 1), rule, TILE, NO_WINDOW, 8192)
    entries, count = slice(int(lasts[1]), int(lasts[2])), int(alone.lasts_s[0])
    np.testing.assert_array_equal(starts[entries], alone.starts_i[:count])
    np.testing.assert_array_equal(ends[entries], alone.ends_i[:count])


MAX_ROWS, MAX_TILES = 100, 256
padded_work = jax.jit(decode_work, static_argnums=(1, 2, 3, 4))


def by_rule(rows: Sequence[int], rule: SplitRule) -> np.ndarray:
    """Return the tiles of each split in the kernel's work list, for rows of these numbers of tiles."""
    lengths = np.zeros(MAX_ROWS, int)
    lengths[: len(rows)] = np.multiply(rows, TILE)
    work = padded_work(batch_of(lengths.tolist(), len(rows)), rule, TILE, NO_WINDOW, MAX_TILES * TILE)
    return (np.asarray(work.ends_i) - np.asarray(work.starts_i))[: int(work.lasts_s[-1])] // TILE


def uniform(rows: Sequence[int], length: int) -> np.ndarray:
    """Return the tiles of each split where all have one length, in tiles."""
    return np.concatenate([np.minimum(length, np.arange(row, 0, -length)) for row in rows])


def longest_share(splits: np.ndarray, num_kv_heads: int) -> float:
    """Return the cost of the thread block with the most work, in tiles."""
    times = np.repeat(splits + CHANGEOVER, num_kv_heads)
    return np.pad(times, (0, -len(times) % WORKERS)).reshape(-1, WORKERS).sum(0).max()


def shapes() -> Iterator[tuple[int, int, list[int]]]:
    """Yield steps: the bucket's rows, kv heads, and the rows' tiles; equal rows and ragged ones."""
    rng = np.random.default_rng(0)
    for live, num_rows in [(1, 16), (2, 16), (5, 16), (16, 16), (17, 32), (40, 64), (64, 64), (100, 128)]:
        for num_kv_heads in (1, 2, 3, 4, 8, 16, 32):
            for tiles in (4, 8, 16, 32, 64, 128):
                yield num_rows, num_kv_heads, [tiles] * live
            yield num_rows, num_kv_heads, np.exp(rng.uniform(0, np.log(256), live)).astype(int).tolist()


def test_thread_blocks_share_about_as_evenly_as_any_length_of_splits_allows() -> None:
    ratios = []
    for num_rows, num_kv_heads, rows in shapes():
        ours = longest_share(by_rule(rows, split_rule(num_rows, num_kv_heads, WORKERS)), num_kv_heads)
        best = min(longest_share(uniform(rows, length), num_kv_heads) for length in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64))
        ratios.append(ours / best)
        most = 1.15 if len(rows) >= 64 and num_kv_heads >= 8 else 2.0
        assert ours <= most * best, (num_rows, num_kv_heads, rows)
    assert np.mean(ratios) < 1.2


@pytest.mark.parametrize("tiles", [64, 100, 256])
@pytest.mark.parametrize("num_kv_heads", [2, 4, 8, 16, 32])
def test_one_long_sequence_keeps_nearly_every_thread_block_busy(num_kv_heads: int, tiles: int) -> None:
    rule = split_rule(16, num_kv_heads, WORKERS)
    splits = by_rule([tiles], rule)
    assert splits.sum() == tiles
    if tiles * num_kv_heads >= rule.least_tiles * WORKERS:
        assert 0.75 * WORKERS <= len(splits) * num_kv_heads <= WORKERS
    even = tiles * num_kv_heads / WORKERS
    assert splits.max() <= max(rule.least_tiles, 1.05 * even + 1)

"""Make steps for tests, compile checks and benchmarks, laid out as an engine lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .layout import AttentionBatch


def ragged_batch(
    chunks: Sequence[tuple[int, int]],
    block_ids: Sequence[Sequence[int]],
    *,
    block_size: int,
    query_tile: int,
    row_alignment: int,
    padding: int = 0,
) -> AttentionBatch:
    """Return a step of sequences (context length, chunk length), those of one token first, in numpy arrays.

    `block_ids` are each sequence's blocks. At the end come `padding` sequences without rows, and at least as many rows
    of padding.
    """
    width = max(map(len, block_ids)) + 1
    tables = np.zeros((len(chunks) + padding, width), np.int32)
    starts, ends, slots, tiles, row = [], [], {}, [], 0
    for i, ((length, chunk), blocks) in enumerate(zip(chunks, block_ids, strict=True)):
        tables[i, : len(blocks)] = blocks
        start = row if chunk == 1 else -(-row // row_alignment) * row_alignment
        positions = np.arange(length - chunk, length)
        slots |= zip(
            range(start, start + chunk),
            (tables[i][positions // block_size] * block_size + positions % block_size).tolist(),
            strict=True,
        )
        tiles += [(i, first) for first in range(start, start + chunk, query_tile) if chunk > 1]
        row = start + chunk
        starts.append(start)
        ends.append(row)
    num_rows = -(-(row + padding) // row_alignment) * row_alignment
    ints = partial(np.array, dtype=np.int32)
    fields: dict[str, Any] = {
        "slots_t": ints([slots.get(row, 0) for row in range(num_rows)]),
        "block_tables_sm": tables,
        "context_lens_s": ints([length for length, _ in chunks] + [0] * padding),
        "query_starts_s": ints(starts + [row] * padding),
        "query_ends_s": ints(ends + [row] * padding),
        "num_decodes": ints(sum(chunk == 1 for _, chunk in chunks)),
        "tile_seqs_i": ints([seq for seq, _ in tiles] + [0]),
        "tile_rows_i": ints([first for _, first in tiles] + [0]),
        "num_tiles": ints(len(tiles)),
    }
    return AttentionBatch(**fields)

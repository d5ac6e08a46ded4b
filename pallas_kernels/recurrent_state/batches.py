"""Make steps for tests and benchmarks, laid out as an engine lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .batch import StateBatch


class Chunk(NamedTuple):
    """One sequence's part of a step."""

    size: int
    """The number of tokens."""
    before: int = 0
    """The number of tokens of the sequence that came before; with 0 it begins."""
    read: int = 0
    write: int = 0
    save_after: int = 0
    """The number of tokens after which the state is also saved; 0 for never."""
    save: int = 0
    rows: tuple[int, ...] = ()
    """The slots that keep the states after its first rows."""


def state_batch(chunks: Sequence[Chunk], *, gap: int = 0, padding: int = 0) -> tuple[StateBatch, int]:
    """Return a step of chunks, those of one token first, in numpy arrays, and its number of rows.

    `gap` rows of padding lie before each longer chunk; `padding` sequences and as many rows are padding at the end.
    """
    starts, row = [], 0
    for chunk in chunks:
        row += gap if chunk.size > 1 else 0
        starts.append(row)
        row += chunk.size
    ints, zeros = partial(np.array, dtype=np.int32), [0] * padding
    pairs = list(zip(starts, chunks, strict=True))
    fields: dict[str, Any] = {
        "query_starts_s": ints(starts + [row] * padding),
        "query_ends_s": ints([start + each.size for start, each in pairs] + [row] * padding),
        "num_decodes": ints(sum(each.size == 1 for each in chunks)),
        "read_slots_s": ints([each.read for each in chunks] + zeros),
        "write_slots_s": ints([each.write for each in chunks] + zeros),
        "save_ends_s": ints([start + each.save_after for start, each in pairs] + zeros),
        "save_slots_s": ints([each.save for each in chunks] + zeros),
    }
    if any(chunk.rows for chunk in chunks):
        row_slots_t = np.zeros(row + padding, np.int32)
        for start, chunk in pairs:
            row_slots_t[start : start + len(chunk.rows)] = chunk.rows
        fields["row_slots_t"] = row_slots_t
    return StateBatch(**fields), row + padding


def live_rows(batch: StateBatch) -> np.ndarray:
    """Return the rows that are not padding."""
    spans = zip(np.asarray(batch.query_starts_s), np.asarray(batch.query_ends_s), strict=True)
    return np.concatenate([np.arange(start, end) for start, end in spans])

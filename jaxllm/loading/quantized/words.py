"""Unpack codes of a few bits from words and bytes."""

from __future__ import annotations

import numpy as np

CHUNK_BYTES = 1 << 20
"""The number of bytes unpacked at once, so that temporaries stay small."""


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of rows of int32 words [rows, n], as uint8 [rows, n * 32 // bits].

    A row is one stream of bits, lowest first; a code may cross from one word to the next.
    """
    rows = np.ascontiguousarray(words).view(np.uint8)
    num_codes = rows.shape[-1] * 8 // bits
    out = np.empty((len(rows), num_codes), np.uint8)
    step = max(1, CHUNK_BYTES // max(1, rows.shape[-1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        out[part] = _cut(rows[part], bits) if 8 % bits == 0 else _regroup(rows[part], bits, num_codes)
    return out


def unpack_nibbles(packed: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """Return the codes of bytes [..., n] that hold two each, uint8 [..., 2 n]; the low half is first by default."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1], 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., int(high_first)])
    np.right_shift(packed, 4, out=out[..., int(not high_first)])
    return out.reshape(*packed.shape[:-1], -1)


def signed(codes: np.ndarray) -> np.ndarray:
    """Return codes of 8 bits less 128, as int8."""
    return (codes ^ np.uint8(128)).view(np.int8)


def order_by_group(groups: np.ndarray, num_groups: int, size: int) -> np.ndarray | None:
    """Return the order that sorts inputs by group, int32; None if they are sorted.

    Raises ValueError if the groups are not of `size`, except the last.
    """
    counts = np.bincount(np.clip(groups, 0, num_groups), minlength=num_groups)
    if len(counts) > num_groups or groups.min() < 0 or (counts[:-1] != size).any() or counts[-1] > size:
        raise ValueError(f" has a g_idx that does not tell {len(groups)} inputs into {num_groups} groups of {size}")
    return None if (groups[1:] >= groups[:-1]).all() else np.argsort(groups, kind="stable").astype(np.int32)


def _cut(rows: np.ndarray, bits: int) -> np.ndarray:
    out = np.empty((*rows.shape, 8 // bits), np.uint8)
    for position in range(8 // bits):
        np.bitwise_and(rows >> np.uint8(position * bits), np.uint8((1 << bits) - 1), out=out[..., position])
    return out.reshape(len(rows), -1)


def _regroup(rows: np.ndarray, bits: int, num_codes: int) -> np.ndarray:
    stream = np.unpackbits(rows, axis=-1, bitorder="little", count=num_codes * bits)
    return np.packbits(stream.reshape(len(rows), num_codes, bits), axis=-1, bitorder="little")[..., 0]

"""Refuse MP4 and MOV files with tables that would expand: FFmpeg makes an entry in memory for each sample that a table
announces, and a table of a few bytes can announce billions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from jaxllm.media.errors import MediaError

_MAX_BOXES = 100_000
"""The most boxes at the top of a file."""
_MAX_SAMPLES = 1 << 24
"""The most samples, which FFmpeg keeps about 40 bytes for each."""
_MAX_EDITED = 1 << 25
"""The most samples times entries of edit lists: each entry may repeat all samples."""
_MAX_CHUNKED = 1 << 34
"""The most samples of PCM by the tables of chunks. FFmpeg makes an entry for 1,024 of them."""
_MAX_FRAGMENTS = 1 << 20
"""The most fragments times tracks, which FFmpeg keeps about 64 bytes for each."""
_COUNTS = {b"stsz": 12, b"stz2": 12, b"trun": 8}
"""The boxes that announce samples, and where, after the name, the number is."""


def check_tables(data: bytes) -> None:
    """Raise MediaError for an MP4 or MOV file whose tables announce more than the file can have.

    All bytes outside the media data are searched for the tables' names, because FFmpeg reads tables in many places.
    """
    num_samples = num_edits = num_chunks = longest_chunk = num_tracks = num_fragments = 0
    for start, end in _without_media(data):
        if data.find(b"cmov", start, end) >= 0:
            raise MediaError("the file's header is compressed: save it again as MP4.")
        num_samples += sum(sum(_numbers(data, name, at, start, end)) for name, at in _COUNTS.items())
        num_edits += sum(_numbers(data, b"elst", 8, start, end))
        num_chunks += sum(sum(_numbers(data, name, 8, start, end)) for name in (b"stco", b"co64"))
        num_tracks += data.count(b"trak", start, end)
        num_fragments += data.count(b"moof", start, end) + sum(_numbers(data, b"tfra", 16, start, end))
        num_fragments += sum(_references(data, start, end))
        longest_chunk = max(longest_chunk, *_chunk_lengths(data, start, end))
    if (
        num_samples > min(len(data), _MAX_SAMPLES)
        or num_samples * num_edits > _MAX_EDITED
        or num_chunks * longest_chunk > _MAX_CHUNKED
        or num_tracks * num_fragments > _MAX_FRAGMENTS
    ):
        raise MediaError("the file is damaged: its tables announce more than it has.")


def _without_media(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the bytes between the boxes of media data begin and end. As in FFmpeg, a box without a length reaches
    to the file's end, and so does one that is too long.
    """
    start = at = 0
    for _ in range(_MAX_BOXES):
        if at + 8 > len(data):
            break
        size, name = struct.unpack_from(">I4s", data, at)
        if size == 1 and at + 16 <= len(data):
            [size] = struct.unpack_from(">Q", data, at + 8)
        end = min(at + size, len(data)) if size else len(data)
        if end < at + 8:
            break
        if name == b"mdat":
            yield start, at
            start = end
        at = end
    else:
        raise MediaError(f"the file has more than {_MAX_BOXES:,} boxes.")
    yield start, at


def _found(data: bytes, name: bytes, start: int, end: int) -> Iterator[int]:
    """Yield where a name is found."""
    while (start := data.find(name, start, end)) >= 0:
        yield start
        start += 4


def _numbers(data: bytes, name: bytes, offset: int, start: int, end: int) -> Iterator[int]:
    """Yield the numbers of 32 bits that are `offset` bytes after each place of a name."""
    for at in _found(data, name, start, end):
        yield int.from_bytes(data[at + offset : at + offset + 4], "big")


def _references(data: bytes, start: int, end: int) -> Iterator[int]:
    """Yield the fragments that each index of segments names."""
    for at in _found(data, b"sidx", start, end):
        offset = at + (26 if data[at + 4 : at + 5] == b"\0" else 34)
        yield int.from_bytes(data[offset : offset + 2], "big")


def _chunk_lengths(data: bytes, start: int, end: int) -> Iterator[int]:
    """Yield 0, and the samples of the longest chunk of each table."""
    yield 0
    for at in _found(data, b"stsc", start, end):
        entries = data[at + 12 : at + 12 + 12 * int.from_bytes(data[at + 8 : at + 12], "big")]
        yield int(np.frombuffer(entries[: len(entries) // 12 * 12], ">u4")[1::3].max(initial=0))

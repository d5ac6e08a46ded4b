"""Refuse Vorbis files with codebooks that would expand: libvorbis keeps tables of all entries that a codebook has, some
of them on the stack, and a book of a few bytes can announce millions.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from jaxllm.media.errors import MediaError

_MAX_ENTRIES = 1 << 17
"""The most entries of all codebooks. Those of libvorbis's encoder have up to 20,000."""
_MAX_VALUES = 1 << 22
"""The most numbers in the entries of all codebooks."""
_MAX_PAGES = 10_000
"""The most pages of headers."""
_SETUP = b"\5vorbis"
_BOOK = 0x564342
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def check_vorbis(data: bytes) -> None:
    """Raise MediaError for an Ogg file whose headers are damaged, or have too large codebooks."""
    packets = _packets(data)
    if next(packets).startswith(b"\1vorbis"):
        next(packets)
        setup = next(packets)
        if setup.startswith(_SETUP):
            _check_books(_Bits(setup[len(_SETUP) :]))


def _packets(data: bytes) -> Iterator[bytes]:
    """Yield the packets of an Ogg file's first stream. Raises MediaError at the end, and at a damaged page or one
    out of order, which libogg would skip.
    """
    at, order, stream, pieces = 0, 0, None, list[bytes]()
    for _ in range(_MAX_PAGES):
        head = data[at : at + 27]
        lengths = data[at + 27 : at + 27 + head[26]] if len(head) == 27 else b""
        end = at + 27 + len(lengths) + sum(lengths)
        page = data[at:end]
        if not page.startswith(b"OggS\0") or len(page) < end - at or head[22:26] != _checksum(page):
            break
        at, start = end, 27 + len(lengths)
        is_continued, (number, page_order) = bool(head[5] & 1), struct.unpack_from("<II", head, 14)
        stream = number if stream is None else stream
        if number != stream:
            continue
        if page_order != order or is_continued != bool(pieces):
            break
        order += 1
        for length in lengths:
            pieces.append(page[start : start + length])
            start += length
            if length < 255:
                yield b"".join(pieces)
                pieces = []
    raise MediaError("the audio cannot be decoded: the Ogg file's headers are damaged or end early.")


def _checksum(page: bytes) -> bytes:
    """Return a page's checksum: a CRC of 32 bits from 0 that takes a byte's high bit first, unlike zlib's."""
    reflected = zlib.crc32((page[:22] + bytes(4) + page[26:]).translate(_REVERSED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return reflected.to_bytes(4, "big").translate(_REVERSED)


class _Bits:
    """Reads numbers of some bits, the low ones first. After the end there are zeros."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_over(self) -> bool:
        return self._at > 8 * len(self._data)

    def read(self, num_bits: int) -> int:
        start, self._at = self._at, self._at + num_bits
        piece = self._data[start // 8 : (self._at + 7) // 8]
        return int.from_bytes(piece, "little") >> start % 8 & ((1 << num_bits) - 1)

    def skip(self, num_bits: int) -> None:
        self._at += num_bits


def _check_books(bits: _Bits) -> None:
    """Check the codebooks at the beginning of a setup header, up to one that libvorbis refuses."""
    num_entries = num_values = 0
    for _ in range(bits.read(8) + 1):
        if bits.read(24) != _BOOK:
            return
        width, entries = bits.read(16), bits.read(24)
        num_entries += entries
        num_values += entries * width
        if num_entries > _MAX_ENTRIES or num_values > _MAX_VALUES:
            raise MediaError("the audio's Vorbis codebooks are too large: encode it again.")
        _skip_lengths(bits, entries)
        kind = bits.read(4)
        if kind in (1, 2):
            bits.skip(64)
            value_bits = bits.read(4) + 1
            bits.skip(1 + value_bits * (entries * width if kind == 2 else _num_values(entries, width)))
        if kind > 2 or bits.is_over:
            return


def _skip_lengths(bits: _Bits, entries: int) -> None:
    """Skip the lengths of a codebook's words."""
    if bits.read(1):  # runs of words of ascending length
        bits.skip(5)
        while entries > 0 and not bits.is_over:
            entries -= bits.read(entries.bit_length())
    elif bits.read(1):  # a bit tells which words exist
        for _ in range(entries):
            if bits.read(1):
                bits.skip(5)
    else:
        bits.skip(5 * entries)


def _num_values(entries: int, width: int) -> int:
    """Return the largest number that, to the power of `width`, is at most `entries`."""
    if width == 0:
        return 0
    number = int(entries ** (1 / width))
    while number**width > entries:
        number -= 1
    while (number + 1) ** width <= entries:
        number += 1
    return number

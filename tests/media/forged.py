"""Files of sounds whose headers lie."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence


def forged_mov(
    num_samples: int = 400, chunk: int = 400, *, num_edits: int = 1, num_tracks: int = 1, extra: bytes = b""
) -> bytes:
    """Return a MOV file of 400 samples of a byte, whose tables announce `num_samples`, and `chunk` for its only chunk.

    Its edit list plays it all `num_edits` times, and other tracks have nothing. `extra` are boxes after the tables.
    """
    unit = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    form = bytes(7) + b"\1" + bytes(8) + struct.pack(">HHHHI", 1, 16, 0, 0, 16_000 << 16)
    tables = box(
        "stbl",
        box("stsd", struct.pack(">II", 0, 1), box("sowt", form)),
        box("stts", struct.pack(">IIII", 0, 1, num_samples, 2)),
        box("stsc", struct.pack(">IIIII", 0, 1, 1, chunk, 1)),
        box("stsz", struct.pack(">III", 0, 1, num_samples)),
        box("stco", struct.pack(">III", 0, 1, 28)),
        extra,
    )
    source = box("dinf", box("dref", struct.pack(">II", 0, 1), box("url ", b"\0\0\0\1")))
    sound = box(
        "mdia",
        box("mdhd", struct.pack(">IIIIII", 0, 0, 0, 16_000, 800, 0)),
        box("hdlr", bytes(8) + b"soun" + bytes(13)),
        box("minf", box("smhd", bytes(8)), source, tables),
    )
    edits = box("elst", struct.pack(">II", 0, num_edits), struct.pack(">III", 50, 0, 0x10000) * num_edits)
    track = box("tkhd", struct.pack(">IIIIII", 7, 0, 0, 1, 0, 50), bytes(16), unit, bytes(8))
    head = box(
        "mvhd", struct.pack(">IIIIIIH", 0, 0, 0, 1000, 50, 0x10000, 0x100), bytes(10), unit, bytes(24), b"\0\0\0\2"
    )
    moov = box("moov", head, box("trak", track, box("edts", edits), sound), box("trak", track) * (num_tracks - 1))
    return box("ftyp", b"qt  " + bytes(4) + b"qt  ") + box("mdat", bytes(400)) + moov


def box(name: str, *parts: bytes) -> bytes:
    """Return a box of an MP4 file."""
    return struct.pack(">I4s", 8 + sum(map(len, parts)), name.encode()) + b"".join(parts)


def page(packets: Sequence[bytes], order: int, *, stream: int = 7, flags: int = 0) -> bytes:
    """Return a page of an Ogg file. Among its flags, 2 is the first page's."""
    lengths = b"".join(b"\xff" * (len(packet) // 255) + bytes([len(packet) % 255]) for packet in packets)
    head = b"OggS\0" + struct.pack("<BqII4xB", flags, 5000 * min(order, 1), stream, order, len(lengths))
    made = head + lengths + b"".join(packets)
    turned = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
    checksum = zlib.crc32(made.translate(turned), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return made[:22] + checksum.to_bytes(4, "big").translate(turned) + made[26:]


def forged_vorbis(num_books: int, log_entries: int, *, ordered: bool = True) -> bytes:
    """Return an Ogg file whose Vorbis codebooks have two to the power of `log_entries` entries each.

    It can be decoded if they are few. If they are not ordered, a bit for each entry tells that it is unused.
    """
    entries = 1 << log_entries
    lengths = [(1, 1), (log_entries - 1, 5), (entries, log_entries + 1)] if ordered else [(0, 1), (1, 1), (0, entries)]
    fields = [(num_books - 1, 8)]
    fields += [(0x564342, 24), (1, 16), (entries, 24), *lengths, (0, 4)] * num_books
    fields += [(0, 22)]  # one time
    fields += [(0, 6), (1, 16), (0, 5), (0, 2), (8, 4)]  # one floor
    fields += [(0, 6), (0, 16), (0, 72), (0, 6), (0, 8), (0, 4)]  # one residue
    fields += [(0, 22), (0, 4), (0, 24)]  # one mapping
    fields += [(0, 6), (0, 33), (0, 8), (1, 1)]  # one mode
    number = num_bits = 0
    for value, width in fields:
        number |= value << num_bits
        num_bits += width
    first = b"\1vorbis" + struct.pack("<IBI12xBB", 0, 1, 16_000, 0x88, 1)
    setup = b"\5vorbis" + number.to_bytes(num_bits // 8 + 1, "little")
    headers = page([first], 0, flags=2) + page([b"\3vorbis" + bytes(8) + b"\1", setup], 1)
    return headers + page([bytes(10)] * 20, 2, flags=4)

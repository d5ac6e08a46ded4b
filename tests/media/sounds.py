"""Sounds as files."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import soundfile

_BLOCK = 1 << 16


def tones(seconds: float, rate: int, num_channels: int = 1) -> np.ndarray:
    """Return tones below 2,500 Hz that start and end softly: float32 [n, c]."""
    t = np.arange(int(seconds * rate)) / rate
    chance = np.random.default_rng()
    frequencies, phases = chance.uniform(100, 2500, (4, num_channels)), chance.uniform(0, 7, (4, num_channels))
    waves = np.sin(2 * np.pi * frequencies * t[:, None, None] + phases).sum(axis=1) / 8
    return (waves * np.hanning(len(t))[:, None]).astype(np.float32)


def encode(samples_nc: np.ndarray, rate: int, form: str = "WAV", subtype: str | None = None) -> bytes:
    """Return a file that libsndfile writes."""
    stream = io.BytesIO()
    with soundfile.SoundFile(stream, "w", rate, samples_nc.shape[1], subtype, format=form) as file:
        for start in range(0, len(samples_nc), _BLOCK):  # a whole sound may be too much for libsndfile's stack
            file.write(samples_nc[start : start + _BLOCK])
    return stream.getvalue()


def wav(
    data: bytes, rate: int = 16_000, *, channels: int = 1, size: int | None = None, kind: int = 3, bits: int = 32
) -> bytes:
    """Return a WAV file of samples that are floats of 32 bits, unless `kind` and `bits` say otherwise.

    `size` is the length in bytes that its header announces.
    """
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width & 0xFFFF_FFFF, width & 0xFFFF, bits)
    size = len(data) if size is None else size
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(chunks) & 0xFFFF_FFFF) + chunks


def contain(samples_nc: np.ndarray, rate: int, form: str, codec: str, *, times: int = 1) -> bytes:
    """Return a file that FFmpeg writes, with its encoded packets `times` times."""
    import av

    stream = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[samples_nc.shape[1]]
    with av.open(stream, "w", format=form) as container:
        audio: Any = container.add_stream(codec, rate=rate)
        audio.codec_context.layout = layout
        audio.codec_context.format = audio.codec_context.codec.audio_formats[0]
        frame = av.AudioFrame.from_ndarray(samples_nc.reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        packets = [packet for each in (frame, None) for packet in audio.encode(each)]
        length = sum(packet.duration or 0 for packet in packets)
        for number in range(times):
            for packet in packets:
                copied = av.Packet(bytes(packet))
                copied.stream, copied.time_base = audio, packet.time_base
                copied.pts = copied.dts = packet.pts + number * length
                copied.duration = packet.duration
                container.mux(copied)
    return stream.getvalue()


def film(seconds: int = 1) -> bytes:
    """Return an MP4 file with pictures and no sound."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        video: Any = container.add_stream("mpeg4", rate=10)
        video.width = video.height = 32
        for _ in range(10 * seconds):
            for packet in video.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")):
                container.mux(packet)
        for packet in video.encode(None):
            container.mux(packet)
    return stream.getvalue()


def forged_mov(num_samples: int = 400, chunk: int = 400, *, num_edits: int = 1, extra: bytes = b"") -> bytes:
    """Return a MOV file of 400 samples of a byte, whose tables announce `num_samples`, and `chunk` for its only chunk.

    Its edit list plays it all `num_edits` times. `extra` are boxes that follow the tables.
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
    moov = box("moov", head, box("trak", track, box("edts", edits), sound))
    return box("ftyp", b"qt  " + bytes(4) + b"qt  ") + box("mdat", bytes(400)) + moov


def box(name: str, *parts: bytes) -> bytes:
    """Return a box of an MP4 file."""
    return struct.pack(">I4s", 8 + sum(map(len, parts)), name.encode()) + b"".join(parts)

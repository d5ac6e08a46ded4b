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

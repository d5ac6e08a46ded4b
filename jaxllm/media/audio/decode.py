"""Decode sounds: samples are counted while they come, whatever a header says, and the result is always mono."""

from __future__ import annotations

import math
import struct
from io import BytesIO
from typing import Any

import numpy as np
import soundfile
import soxr

from jaxllm.media.audio.blocks import BLOCK, MAX_CHANNELS, AudioLimits, Blocks, check_channels, refusing_damage
from jaxllm.media.audio.containers import container_blocks, container_of
from jaxllm.media.audio.vorbis import check_vorbis
from jaxllm.media.errors import MediaError

_MIN_RATE, _MAX_RATE = 1_000, 384_000
_MAX_LENGTH = 1 << 40
"""libsndfile gives more samples than this for a FLAC file that comes out of a pipe, which it cannot read in blocks."""

_FORMATS = frozenset(("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"))
"""libsndfile's names of the formats that it decodes here."""
_MARKS = (b"RIFF", b"RF64", b"fLaC", b"OggS")
"""What their files begin with, besides MP3 files, which begin with a frame."""
_MAX_TAGS = 100
"""The most ID3 tags before a sound."""
_UNKNOWN_SIZE = 0x7FFF_0000
"""Programs that write a WAV file into a pipe give its length as this or more."""
_MAX_CHUNKS = 1_000
"""The most chunks of a WAV file: each takes time, and most files have three."""


def decode_audio(value: Any, rate: int, limits: AudioLimits | None = None) -> np.ndarray:
    """Return a sound's samples, float32 [n], `rate` a second: the mean of its channels.

    `value` is the bytes of a file: WAV, FLAC, Ogg or MP3, or MP4, M4A, MOV, WebM or Matroska, which need PyAV. Or it
    is an array of floats [n], [channels, n] or [n, channels], with samples from -1 to 1, or a pair of one and its
    samples a second; an array alone has `rate`. Raises MediaError for anything else, for damaged files, for no samples
    and for those that are not finite, and for what exceeds a limit; and VLLMValidationError for a file that needs PyAV
    without it.
    """
    limits = limits or AudioLimits()
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused at the end
        if isinstance(value, bytes | bytearray | memoryview):
            return _decode_file(bytes(value), rate, limits)
        source_rate: Any = rate
        if isinstance(value, tuple) and len(value) == 2:
            value, source_rate = value
        return _decode_array(value, source_rate, rate, limits)


class _Gathered:
    """Samples of a sound that comes in blocks, as mono at another rate. Raises MediaError once a limit is exceeded."""

    def __init__(self, source_rate: float, rate: int, limits: AudioLimits) -> None:
        if not _MIN_RATE <= source_rate <= _MAX_RATE:
            message = (
                f"the audio has {source_rate:,.10g} samples a second, and may have {_MIN_RATE:,} to {_MAX_RATE:,}."
            )
            raise MediaError(message)
        self._source_rate, self._rate, self._limits = source_rate, rate, limits
        self._resampler = None if source_rate == rate else soxr.ResampleStream(source_rate, rate, 1, "float32")
        self._num_samples = self._num_values = 0
        self._kept = bytearray()

    def add(self, block_nc: np.ndarray) -> None:
        """Add samples of all channels, float32 [n, c]."""
        num_samples, num_channels = block_nc.shape
        self._num_samples += num_samples
        self._num_values += block_nc.size
        longest = self._limits.max_seconds
        if longest is not None and self._num_samples > longest * self._source_rate:
            raise MediaError(f"the audio is longer than {longest:g} s: send a shorter one, or parts of it.")
        most = self._limits.max_values
        if self._num_values > most:
            message = f"the audio has more than {most:,} samples in all channels: send one of a lower rate, "
            raise MediaError(message + "with one channel.")
        self._keep(sum(block_nc.T) / num_channels)

    def finish(self) -> np.ndarray:
        """Return all samples, float32 [n]."""
        if self._resampler is not None:
            self._keep(np.empty(0, np.float32), is_last=True)
        samples = np.frombuffer(self._kept, np.float32)
        if samples.size == 0:
            raise MediaError("the audio has no samples.")
        if not np.isfinite(samples).all():
            raise MediaError("the audio has samples that are infinite or not a number.")
        return samples

    def _keep(self, samples: np.ndarray, *, is_last: bool = False) -> None:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=is_last)
        if len(self._kept) + samples.nbytes > self._limits.max_bytes:
            limit = self._limits.max_bytes
            message = f"the audio takes more than {limit:,} bytes, which are {limit / 4 / self._rate:,.0f} s at "
            raise MediaError(f"{message}{self._rate:,} samples a second: send a shorter one, or parts of it.")
        self._kept += samples.tobytes()


def _decode_array(value: Any, source_rate: Any, rate: int, limits: AudioLimits) -> np.ndarray:
    is_rate = isinstance(source_rate, int | float | np.number) and not isinstance(source_rate, bool)
    if not is_rate or not math.isfinite(source_rate):
        raise MediaError(f"the samples a second of audio must be a number, not {type(source_rate).__name__}.")
    if not isinstance(value, np.ndarray):
        message = "audio must be bytes, an array of floats, or a pair of an array and its samples a second, not "
        raise MediaError(f"{message}{type(value).__name__}.")
    if value.dtype.kind != "f":
        message = f"an array of audio must be floats from -1 to 1, not {value.dtype}"
        message += ": divide integers of 16 bits by 32,768." if value.dtype.kind == "i" else "."
        raise MediaError(message)
    gathered = _Gathered(float(source_rate), rate, limits)
    samples_nc = _channels_last(value)
    for start in range(0, len(samples_nc), BLOCK):
        gathered.add(samples_nc[start : start + BLOCK].astype(np.float32))
    return gathered.finish()


def _channels_last(array: np.ndarray) -> np.ndarray:
    """Return an array of samples as [n, c]. Raises MediaError if that is not clear."""
    if array.ndim == 1:
        return array[:, None]
    if array.ndim == 2:
        are_few = [1 <= size <= MAX_CHANNELS for size in array.shape]
        if are_few == [True, False]:
            return array.T
        if are_few == [False, True]:
            return array
    shape = list(array.shape)
    message = f"an array of audio must be [n], [channels, n] or [n, channels] with at most {MAX_CHANNELS} channels and"
    raise MediaError(f"{message} more samples; it is {shape}.")


def _decode_file(data: bytes, rate: int, limits: AudioLimits) -> np.ndarray:
    data = _without_tags(data)
    container = container_of(data)
    if container is not None:
        blocks = container_blocks(data, container)
    elif data.startswith(_MARKS) or _is_mpeg_frame(data):
        blocks = _file_blocks(data)
    else:
        raise MediaError("the audio is not a WAV, FLAC, Ogg, MP3, MP4, M4A, MOV, WebM or Matroska file.")
    gathered = None
    for source_rate, block_nc in blocks:
        gathered = gathered or _Gathered(source_rate, rate, limits)
        gathered.add(block_nc)
    if gathered is None:
        raise MediaError("the audio has no samples.")
    return gathered.finish()


def _without_tags(data: bytes) -> bytes:
    """Return a file without the ID3 tags before it, which libsndfile skips before it looks at the format."""
    at = 0
    for _ in range(_MAX_TAGS):
        if data[at : at + 3] != b"ID3" or at + 10 > len(data):
            return data[at:]
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size
    raise MediaError(f"the audio has more than {_MAX_TAGS} ID3 tags.")


def _is_mpeg_frame(data: bytes) -> bool:
    """Return whether a file begins with a frame of MPEG audio, layer 1 to 3."""
    return len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0


def _file_blocks(data: bytes) -> Blocks:
    """Yield the samples of a file that libsndfile reads."""
    _check_wav_size(data)
    if data.startswith(b"OggS"):
        check_vorbis(data)
    with refusing_damage(), soundfile.SoundFile(BytesIO(data)) as file:
        if file.format not in _FORMATS:
            raise MediaError("the audio is not a WAV, FLAC, Ogg or MP3 file.")
        check_channels(file.channels)
        if file.frames > _MAX_LENGTH:
            raise MediaError(
                "the audio file does not say its length: encode it again, into a file and not into a pipe."
            )
        num_samples = 0
        while len(block_nc := file.read(BLOCK, dtype="float32", always_2d=True)):
            num_samples += len(block_nc)
            yield file.samplerate, block_nc
        if file.format == "FLAC" and num_samples < file.frames:
            raise MediaError("the audio ends before its header says.")


def _check_wav_size(data: bytes) -> None:
    """Raise MediaError for a WAV file that ends before the samples that its header announces."""
    at = 12
    for _ in range(_MAX_CHUNKS):
        if data[:4] != b"RIFF" or at + 8 > len(data):
            return
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"data" and len(data) - at - 8 < size < _UNKNOWN_SIZE:
            raise MediaError("the audio ends before its header says.")
        at += 8 + size + size % 2
    raise MediaError(f"the WAV file has more than {_MAX_CHUNKS:,} chunks: save it again without its notes.")

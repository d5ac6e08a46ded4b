"""Read sounds out of the containers of films, through PyAV."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from itertools import chain
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.blocks import BLOCK, Blocks, check_channels, refusing_damage
from jaxllm.media.audio.boxes import check_tables
from jaxllm.media.errors import MediaError

_CONTAINERS = {b"ftyp": ("mov", 4), b"\x1aE\xdf\xa3": ("matroska", 0)}
"""By the bytes that stand in a file, FFmpeg's name of its format and where they stand. FFmpeg is not asked to guess: it
would also take playlists, which name other files and hosts."""
_CODECS = frozenset(("aac", "alac", "flac", "mp3", "opus", "vorbis"))


def container_of(data: bytes) -> str | None:
    """Return FFmpeg's name of a file's format; None if it is no container of films."""
    return next((name for mark, (name, at) in _CONTAINERS.items() if data[at : at + 4] == mark), None)


def container_blocks(data: bytes, name: str) -> Blocks:
    """Yield the samples of a file's first sound. Raises MediaError and VLLMValidationError as `decode_audio` does."""
    try:
        import av
    except ImportError as error:
        message = "reading MP4, M4A, MOV, WebM and Matroska files needs PyAV: pip install 'jaxllm[video]', or send a "
        raise VLLMValidationError(f"{message}WAV, FLAC, Ogg or MP3 file.", parameter="audio") from error
    if name == "mov":
        check_tables(data)
    with refusing_damage(), av.open(BytesIO(data), "r", format=name) as container:
        if not container.streams.audio:
            raise MediaError("the file has no audio in it.")
        stream = container.streams.audio[0]
        codec = stream.codec_context.codec.canonical_name
        if codec not in _CODECS and not codec.startswith("pcm_"):
            raise MediaError(f"the audio is not encoded as one of {', '.join(sorted(_CODECS))} or PCM.")
        yield from _packed_blocks(container.decode(stream))


def _packed_blocks(frames: Iterable[Any]) -> Blocks:
    """Yield the samples of frames that FFmpeg decodes."""
    import av

    converter, rate, num_channels = None, 0, 1
    for frame in chain(frames, [None]):  # None: what the converter has left
        if converter is None:
            if frame is None:
                return
            rate, num_channels = frame.sample_rate, len(frame.layout.channels)
            check_channels(num_channels)
            converter = av.AudioResampler(format="flt", layout=frame.layout, rate=rate, frame_size=BLOCK)
        for packed in converter.resample(frame):  # which raises if the rate or the layout changes
            yield rate, packed.to_ndarray().reshape(-1, num_channels)

"""Take some frames of a video: of a file, through PyAV, or of an array. Limits are checked before any frame exists."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.boxes import check_tables
from jaxllm.media.decode import MAX_PIXELS, check_size, decode_image, image_size
from jaxllm.media.errors import MediaError

MAX_FRAMES = 768
"""The most frames that are taken of a video, as in vLLM."""
_MAX_FPS = 30.0
_MIN_SOURCE_FPS, _MAX_SOURCE_FPS = 0.001, 1000.0
_MAX_SOURCE_FRAMES = 36_000
"""The most frames of a file, because all frames before one that is taken are decoded; vLLM's limit too."""
_MAX_SOURCE_PIXELS = _MAX_SOURCE_FRAMES * 1920 * 1080
"""The most pixels of all frames of a file."""
_MAX_DURATION = 1e9
_MAX_INDEX = 2**31
"""What the numbers of frames in an array's metadata are below."""
_MAX_SECONDS = 30.0
"""How long the frames of a file may take to decode."""
_MAX_TAKEN_PIXELS = 3 * MAX_PIXELS
"""The most pixels of all frames that are taken: 1.6 GB."""

_CONTAINERS = {b"ftyp": ("mov", 4), b"\x1aE\xdf\xa3": ("matroska", 0), b"AVI ": ("avi", 8)}
"""By the bytes that stand in a file, FFmpeg's name of its format and where they stand. FFmpeg is not asked to guess: it
would also take playlists, which name other files and hosts."""
_SIZES_DIFFER = "the frames of a video must all have the same size."
_CODECS = frozenset(("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which frames are taken: `num_frames` at equal distances or, if set, `fps` a second; at most `max_frames`.

    A video with fewer frames gives all of them. Raises MediaError for values outside their ranges: vLLM's -1, all
    frames, is outside too.
    """

    num_frames: int = 32
    """1 to MAX_FRAMES."""
    fps: float | None = None
    """Above 0 and at most _MAX_FPS."""
    max_frames: int = MAX_FRAMES
    """1 to MAX_FRAMES."""

    def __post_init__(self) -> None:
        for name, value in (("num_frames", self.num_frames), ("max_frames", self.max_frames)):
            if type(value) is not int or not 1 <= value <= MAX_FRAMES:
                message = f"{name} of a video must be an integer from 1 to {MAX_FRAMES}."
                raise MediaError(message, parameter=name)
        if self.fps is not None and (type(self.fps) not in (int, float) or not 0 < self.fps <= _MAX_FPS):
            raise MediaError(f"fps of a video must be above 0 and at most {_MAX_FPS:g}.", parameter="fps")

    def merged(self, values: Mapping[str, Any]) -> Sampling:
        """Return the sampling that a request asks for by `media_io_kwargs`; what it leaves out stays.

        `num_frames` and `fps` exclude each other. A request may not raise `max_frames`. Raises MediaError otherwise.
        """
        for name in values:
            if name not in ("num_frames", "fps", "max_frames"):
                message = f"media_io_kwargs for videos has no {name!r}: it may have num_frames, fps and max_frames."
                raise MediaError(message, parameter="media_io_kwargs")
        if "num_frames" in values and "fps" in values:
            raise MediaError("a video has either num_frames or fps, not both.", parameter="media_io_kwargs")
        fps = None if "num_frames" in values else values.get("fps", self.fps)
        if "fps" in values and fps is None:
            raise MediaError("fps of a video must be a number.", parameter="fps")
        wanted = Sampling(values.get("num_frames", self.num_frames), fps, values.get("max_frames", self.max_frames))
        asked = max(wanted.max_frames, values.get("num_frames", 1))
        if asked > self.max_frames:
            message = f"a video may have at most {self.max_frames} frames here, and {asked} were asked for."
            raise MediaError(message, parameter="num_frames")
        return wanted

    def indices(self, num_source_frames: int, source_fps: float) -> list[int]:
        """Return the ascending indices of the frames to take from a video of 1 or more frames, as vLLM does."""
        wanted = self.num_frames if self.fps is None else max(1, int(num_source_frames / source_fps * self.fps))
        count = min(wanted, self.max_frames, num_source_frames)
        return np.linspace(0, num_source_frames - 1, count, dtype=int).tolist()


@dataclass(frozen=True, slots=True)
class Video:
    """Frames that were taken of a video."""

    frames_thwc: np.ndarray
    """[t, h, w, 3], uint8 RGB."""
    indices: list[int]
    """The index of each frame in the video, ascending."""
    num_source_frames: int
    """How many frames the video has."""
    fps: float | None
    """The video's frames a second; None if that is not known."""
    duration: float | None = None
    """The video's length in seconds; None if that is not known."""


def decode_video(value: Any, sampling: Sampling | None = None) -> Video:
    """Return frames of a video.

    `value` is the bytes of a file (MP4, MOV, WebM, Matroska or AVI), and `sampling` says which frames are taken. Or it
    is all frames, as a uint8 array [t, h, w, 3] or [t, 3, h, w] or a list of images (see `decode_image`), or a pair of
    those and metadata, a dict with `fps`, `frames_indices` and `total_num_frames`. Raises MediaError for anything else,
    for damaged files and for what is too large, and VLLMValidationError for a file without PyAV.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        with _opened(bytes(value)) as container:
            return _sample(container, sampling or Sampling())
    metadata: Any = None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None):
        value, metadata = value
    return _describe(_stack(value), metadata or {})


def video_size(value: Any, sampling: Sampling) -> tuple[int, int, int]:
    """Return the number, height and width of the frames that `decode_video` takes, before any of a file is decoded.

    A damaged file may have fewer, and a turn swaps the sides. Raises MediaError as `decode_video` does.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        with _opened(bytes(value)) as container:
            header = _read_header(container, sampling)
            return len(header.indices), header.height, header.width
    frames = value[0] if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping) else value
    if isinstance(frames, list | tuple) and frames:
        height, width = image_size(frames[0])
        _check_taken(len(frames), height * width)
        return len(frames), height, width
    number, height, width, _ = _stack(frames).shape
    return number, height, width


def _stack(frames: Any) -> np.ndarray:
    """Return given frames as [t, h, w, 3]."""
    if isinstance(frames, np.ndarray):
        if frames.ndim != 4 or frames.dtype != np.uint8 or 0 in frames.shape:
            message = f"an array of frames must be uint8 [t, h, w, 3], not {frames.dtype} {list(frames.shape)}."
            raise MediaError(message)
        _check_taken(len(frames), frames.size // (3 * len(frames)))
        first, last = frames.shape[1] == 3, frames.shape[3] == 3
        if first == last:
            reason = "its channels may be first or last" if first else "it has no three channels"
            raise MediaError(f"an array of frames must be [t, h, w, 3]; of the shape {list(frames.shape)} {reason}.")
        frames_thwc = frames.transpose(0, 2, 3, 1) if first else frames
        check_size((frames_thwc.shape[2], frames_thwc.shape[1]))
        return np.ascontiguousarray(frames_thwc)
    if not isinstance(frames, list | tuple) or not frames:
        message = f"a video must be bytes, an array of frames or a list of images, not {type(frames).__name__}."
        raise MediaError(message)
    first = decode_image(frames[0])
    pixels = first.width * first.height
    _check_taken(len(frames), pixels)
    images = [first, *(decode_image(frame, max_pixels=pixels) for frame in frames[1:])]
    if any(image.size != first.size for image in images):
        raise MediaError(_SIZES_DIFFER)
    return np.stack([np.asarray(image) for image in images])


def _describe(frames_thwc: np.ndarray, metadata: Mapping[str, Any]) -> Video:
    """Return frames with what the user says about them; width, height and backend are not used."""
    known = {"fps", "frames_indices", "total_num_frames", "width", "height", "duration", "video_backend"}
    if unknown := set(metadata) - known - {"do_sample_frames"}:
        raise MediaError(
            f"a video's metadata has no {min(map(str, unknown))!r}: it may have {', '.join(sorted(known))}."
        )
    if metadata.get("do_sample_frames"):
        raise MediaError("do_sample_frames is not supported for an array of frames: pass the frames to use.")
    fps = metadata.get("fps")
    if fps is not None and (not _is_number(fps) or not _MIN_SOURCE_FPS <= fps <= _MAX_SOURCE_FPS):
        raise MediaError(f"fps in a video's metadata must be from {_MIN_SOURCE_FPS:g} to {_MAX_SOURCE_FPS:g}.")
    indices = metadata.get("frames_indices")
    if indices is None:
        indices = range(len(frames_thwc))
    is_list = isinstance(indices, list | tuple | range | np.ndarray) and len(indices) == len(frames_thwc)
    if not is_list or not all(isinstance(index, int | np.integer) for index in indices):
        raise MediaError("frames_indices in a video's metadata must have one integer for each frame.")
    total = metadata.get("total_num_frames") or indices[-1] + 1
    in_order = all(before <= after for before, after in pairwise(indices))
    if not isinstance(total, int | np.integer) or not (in_order and indices[0] >= 0 and indices[-1] < total):
        raise MediaError("frames_indices in a video's metadata must ascend from 0 or more to below total_num_frames.")
    if total >= _MAX_INDEX:
        raise MediaError(f"total_num_frames in a video's metadata must be below {_MAX_INDEX:,}.")
    duration = metadata.get("duration")
    if duration is not None and (not _is_number(duration) or not 0 <= duration <= _MAX_DURATION):
        raise MediaError(f"duration in a video's metadata must be from 0 to {_MAX_DURATION:g} seconds.")
    return Video(
        frames_thwc,
        [int(index) for index in indices],
        int(total),
        fps=None if fps is None else float(fps),
        duration=None if duration is None else float(duration),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open a file. Raises MediaError for another container, and if what is done with the file shows it damaged."""
    names = [name for mark, (name, at) in _CONTAINERS.items() if data[at : at + 4] == mark]
    if not names:
        raise MediaError("the video is not an MP4, MOV, WebM, Matroska or AVI file.")
    try:
        import av
    except ImportError as error:
        message = "reading video files needs PyAV: pip install 'jaxllm[video]', or pass an array of frames."
        raise VLLMValidationError(message, parameter="video") from error
    if names[0] == "mov":
        check_tables(data)
    try:
        with av.open(BytesIO(data), format=names[0]) as container:
            yield container
    except MediaError:
        raise
    except Exception as error:
        raise MediaError("the video cannot be decoded: the file is damaged or ends early.") from error


@dataclass(frozen=True, slots=True)
class _Header:
    """What a file's header and packets say."""

    stream: Any
    width: int
    height: int
    fps: float
    num_source_frames: int
    indices: list[int]
    """The frames to take."""


def _read_header(container: Any, sampling: Sampling) -> _Header:
    """Return what is known of a file before a frame is decoded. Raises MediaError for what is too large."""
    if not container.streams.video:
        raise MediaError("the file has no video in it.")
    stream = container.streams.video[0]
    if stream.codec_context.codec.canonical_name not in _CODECS:
        raise MediaError(f"the video is not encoded as one of {', '.join(sorted(_CODECS))}.")
    width, height = stream.codec_context.width, stream.codec_context.height
    check_size((width, height))
    fps = float(stream.average_rate or 0)
    if not _MIN_SOURCE_FPS <= fps <= _MAX_SOURCE_FPS:
        message = f"the video has {fps:g} frames a second, and may have {_MIN_SOURCE_FPS:g} to {_MAX_SOURCE_FPS:g}: "
        raise MediaError(message + "encode it at another rate, or pass an array of frames.")
    num_source_frames = _count_frames(container, stream, width * height)
    indices = sampling.indices(num_source_frames, fps)
    _check_taken(len(indices), width * height)
    return _Header(stream, width, height, fps, num_source_frames, indices)


def _sample(container: Any, sampling: Sampling) -> Video:
    """Return the sampled frames of a file. Raises MediaError for what is too large or takes too long."""
    header = _read_header(container, sampling)
    indices = header.indices
    frames_thwc = np.empty((len(indices), header.height, header.width, 3), np.uint8)
    taken, turns = 0, 0
    end = time.monotonic() + _MAX_SECONDS
    container.seek(0, stream=header.stream)
    for index, frame in enumerate(container.decode(header.stream)):
        if time.monotonic() > end:
            message = f"decoding the video takes longer than {_MAX_SECONDS:g} s: send a shorter or smaller one."
            raise MediaError(message)
        if (frame.width, frame.height) != (header.width, header.height):
            raise MediaError(_SIZES_DIFFER)
        if index == indices[taken]:
            frames_thwc[taken] = frame.to_ndarray(format="rgb24")
            turns = round(frame.rotation / 90)
            taken += 1
        if taken == len(indices):
            break
    if taken == 0:
        raise MediaError("the video has no frame that can be decoded.")
    upright_thwc = np.ascontiguousarray(np.rot90(frames_thwc[:taken], turns, axes=(1, 2)))
    duration = header.num_source_frames / header.fps
    return Video(upright_thwc, indices[:taken], header.num_source_frames, header.fps, duration)


def _count_frames(container: Any, stream: Any, pixels: int) -> int:
    """Return the number of frames by counting packets: nothing is decoded, and a header may say anything.

    Some decoders give a few frames less, at the end. Raises MediaError for none and for too many.
    """
    limit = min(_MAX_SOURCE_FRAMES, _MAX_SOURCE_PIXELS // pixels)
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0 and not packet.is_discard
        if count > limit:
            raise MediaError(f"the video has more than {limit:,} frames, the limit for its size.")
    if count == 0:
        raise MediaError("the video has no frames.")
    return count


def _check_taken(count: int, pixels: int) -> None:
    if count * pixels > _MAX_TAKEN_PIXELS:
        message = f"{count} frames of {pixels:,} pixels exceed the limit of {_MAX_TAKEN_PIXELS:,}: sample fewer frames."
        raise MediaError(message)

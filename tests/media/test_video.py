"""Frames of videos are taken within limits that a request cannot raise."""

from __future__ import annotations

import importlib.util
import io
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media import frames as video
from jaxllm.media.errors import MediaError
from jaxllm.media.frames import MAX_FRAMES, Sampling, decode_video, video_size

HAS_AV = importlib.util.find_spec("av") is not None
needs_av = pytest.mark.skipif(not HAS_AV, reason="needs jaxllm[video]")
MP4 = b"\0\0\0\x18ftypisom"
NOT_COUNTS = [-1, 0, MAX_FRAMES + 1, 10**30, 1.0, True, "8", None, float("nan"), [1]]
NOT_RATES = [-1, 0, -0.0, 30.1, 1e300, float("inf"), float("nan"), True, "2", None, [1]]


def frames(count: int = 5, height: int = 16, width: int = 24) -> np.ndarray:
    """Return frames [t, h, w, 3]; each has one colour, so that a lossy codec keeps it about."""
    colours = np.linspace(20, 220, count).astype(np.uint8)
    return np.broadcast_to(colours[:, None, None, None], (count, height, width, 3)).copy()


@pytest.mark.parametrize("name", ["num_frames", "max_frames"])
@pytest.mark.parametrize("value", NOT_COUNTS)
def test_counts_of_frames_outside_their_range_are_refused(name: str, value: Any):
    """CVE-2026-105758 and its kin: vLLM's -1 for all frames is refused too."""
    for make in (lambda: Sampling(**{name: value}), lambda: Sampling().merged({name: value})):
        with pytest.raises(MediaError) as caught:
            make()
        assert caught.value.parameter == name


@pytest.mark.parametrize("value", NOT_RATES)
def test_rates_outside_their_range_are_refused(value: Any):
    with pytest.raises(MediaError) as caught:
        Sampling().merged({"fps": value})
    assert caught.value.parameter == "fps"


def test_a_request_may_lower_the_operators_limit_and_not_raise_it():
    operators = Sampling(num_frames=8, max_frames=16)
    assert operators.merged({}) == operators
    assert operators.merged({"num_frames": 16}) == Sampling(16, None, 16)
    assert operators.merged({"fps": 2, "max_frames": 4}) == Sampling(8, 2, 4)
    assert Sampling(fps=2.0).merged({"num_frames": 4}) == Sampling(4)
    for values in ({"num_frames": 17}, {"max_frames": 17}, {"fps": 1, "max_frames": 768}):
        with pytest.raises(MediaError, match="at most 16 frames"):
            operators.merged(values)
    with pytest.raises(MediaError, match="not both"):
        operators.merged({"num_frames": 4, "fps": 1})
    with pytest.raises(MediaError, match="no 'backend'"):
        operators.merged({"backend": "x"})


def test_frames_are_taken_at_equal_distances():
    assert Sampling(4).indices(10, 25.0) == [0, 3, 6, 9]
    assert Sampling(32).indices(3, 25.0) == [0, 1, 2]
    assert Sampling(1).indices(10, 25.0) == [0]
    assert Sampling(fps=2).indices(100, 25.0) == [0, 14, 28, 42, 56, 70, 84, 99]
    assert Sampling(fps=0.01).indices(10, 25.0) == [0]
    assert len(Sampling(fps=30, max_frames=5).indices(1000, 10.0)) == 5


@given(st.integers(1, MAX_FRAMES), st.none() | st.floats(0.01, 30), st.integers(1, 40_000), st.floats(0.1, 1000))
def test_sampled_indices_ascend_within_the_video(count: int, fps: float | None, total: int, rate: float):
    indices = Sampling(count, fps, 64).indices(total, rate)
    assert 1 <= len(indices) <= min(64, total)
    assert indices == sorted(set(indices))
    assert indices[0] == 0
    assert indices[-1] < total


def test_arrays_of_frames():
    whole = frames()
    for value in (whole, whole.transpose(0, 3, 1, 2).copy(), list(whole), [Image.fromarray(frame) for frame in whole]):
        decoded = decode_video(value)
        np.testing.assert_array_equal(decoded.frames_thwc, whole)
        assert (decoded.indices, decoded.num_source_frames, decoded.fps) == ([0, 1, 2, 3, 4], 5, None)


def test_metadata_of_frames():
    metadata = {"fps": 2, "frames_indices": [0, 3, 6, 9, 9], "total_num_frames": 12, "duration": 6.0, "width": 24}
    decoded = decode_video((frames(), metadata))
    assert (decoded.indices, decoded.fps, decoded.duration) == ([0, 3, 6, 9, 9], 2.0, 6.0)
    assert decoded.num_source_frames == 12
    assert decode_video((frames(), None)).fps is None
    assert decode_video((frames(), {"fps": 10.0, "do_sample_frames": False})).fps == 10.0


@pytest.mark.parametrize(
    "metadata",
    [
        {"fps": 0},
        {"fps": -1},
        {"fps": 1e-320},
        {"fps": 0.0009},
        {"fps": 10**400},
        {"fps": float("nan")},
        {"fps": float("inf")},
        {"fps": "2"},
        {"fps": True},
        {"frames_indices": [0, 1]},
        {"frames_indices": 5},
        {"frames_indices": [0, 1, 2, 3, "4"]},
        {"frames_indices": [4, 3, 2, 1, 0]},
        {"frames_indices": [-1, 0, 1, 2, 3]},
        {"frames_indices": [0, 1, 2, 3, 4], "total_num_frames": 4},
        {"total_num_frames": "5"},
        {"total_num_frames": 2**31},
        {"duration": 10**400},
        {"duration": "1:00"},
        {"duration": -1.0},
        {"duration": 1e300},
        {"do_sample_frames": True},
        {"unknown": 1},
    ],
)
def test_impossible_metadata_are_refused(metadata: dict[str, Any]):
    with pytest.raises(MediaError):
        decode_video((frames(), metadata))


@pytest.mark.parametrize(
    "value",
    [
        frames()[0],
        frames().astype(np.float32),
        frames()[:0],
        frames()[..., :2],
        frames(5, 3, 24).transpose(0, 1, 2, 3),
        [frames()[0], frames()[0, :8]],
        [],
        "video.mp4",
        None,
        (),
    ],
)
def test_other_values_are_refused(value: Any):
    with pytest.raises(MediaError) as caught:
        decode_video(value)
    assert "0x" not in str(caught.value)


def test_too_many_pixels_are_refused_before_they_are_copied():
    giant = np.broadcast_to(np.zeros((), np.uint8), (2000, 1000, 1000, 3))
    with pytest.raises(MediaError, match="sample fewer frames"):
        decode_video(giant)
    with pytest.raises(MediaError, match="sample fewer frames"):
        decode_video([giant[0], *["never looked at"] * 2000])
    with pytest.raises(MediaError, match="more than the limit of 384"):
        decode_video([frames()[0], giant[0]])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"GIF89a",
        b"<?xml version='1.0'?><MPD>",
    ],
)
def test_playlists_and_other_files_are_refused(data: bytes):
    with pytest.raises(MediaError, match="not an MP4"):
        decode_video(data)


@pytest.mark.skipif(HAS_AV, reason="PyAV is installed")
def test_files_are_refused_by_name_without_pyav():
    with pytest.raises(VLLMValidationError, match=r"pip install 'jaxllm\[video\]'"):
        decode_video(MP4)


def encode(whole: np.ndarray, form: str, codec: str, rate: int = 10) -> bytes:
    """Return a video file of frames."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as container:
        track: Any = container.add_stream(codec, rate=Fraction(rate))
        track.height, track.width, track.pix_fmt = *whole.shape[1:3], "yuv420p"
        for frame in whole:
            container.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(track.encode(None))
    return stream.getvalue()


FILES = [("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")]


@needs_av
@pytest.mark.parametrize("seconds_per_frame", [2000, 35_791_390])
def test_files_with_hardly_a_frame_are_refused(seconds_per_frame: int):
    rate = struct.pack("<II", seconds_per_frame, 1)
    data = encode(frames(32), "avi", "mpeg4")
    at = data.index(b"strh") + 8 + 20  # behind "strh" and its length: dwScale and dwRate
    assert struct.unpack("<II", data[at : at + 8]) == (1, 10)
    with pytest.raises(MediaError, match=r"frames a second, and may have 0.001 to 1000"):
        video_size(data[:at] + rate + data[at + 8 :], Sampling())


@needs_av
@pytest.mark.parametrize(("form", "codec"), FILES)
def test_frames_of_files(form: str, codec: str):
    whole = frames(20)
    decoded = decode_video(encode(whole, form, codec), Sampling(5))
    assert (decoded.indices, decoded.num_source_frames, decoded.fps) == ([0, 4, 9, 14, 19], 20, 10.0)
    assert np.abs(decoded.frames_thwc.astype(int) - whole[decoded.indices]).max() <= 8


@needs_av
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("form", "codec"), FILES)
def test_files_that_end_early_are_refused_or_read_as_far_as_they_go(form: str, codec: str, share: float):
    data = encode(frames(20), form, codec)
    try:
        decoded = decode_video(data[: int(len(data) * share)], Sampling(5))
    except MediaError:
        return
    assert decoded.num_source_frames < 20


@needs_av
def test_a_turned_video_is_upright():
    whole = frames(2)
    whole[:, :8] = 200
    data = encode(whole, "mp4", "libx264")
    one = 1 << 16
    level, turned = (np.array(m, ">i4").tobytes() for m in ((one, 0, 0, 0, one), (0, one, 0, -one, 0)))
    assert data.count(level) >= 1
    start = data.find(level, data.find(b"tkhd"))
    decoded = decode_video(data[:start] + turned + data[start + len(turned) :], Sampling(1))
    assert decoded.frames_thwc.shape == (1, 24, 16, 3)
    expected = np.rot90(whole[0], -1)
    assert np.abs(decoded.frames_thwc[0].astype(int) - expected).max() < 40


@needs_av
def test_a_file_that_takes_long_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(video, "_MAX_SECONDS", 0.0)
    with pytest.raises(MediaError, match="decoding the video takes longer than 0 s"):
        decode_video(encode(frames(), "mp4", "mpeg4"))


@needs_av
@pytest.mark.parametrize(("width", "height"), [(24, 16), (16, 24)])
def test_the_frames_of_a_file_are_known_without_decoding(width: int, height: int):
    data = encode(frames(20, height, width), "mp4", "mpeg4")
    assert video_size(data, Sampling(5)) == (5, height, width) == decode_video(data, Sampling(5)).frames_thwc.shape[:3]


@pytest.mark.parametrize("kind", [list, np.asarray, lambda whole: (whole, {"fps": 1.0})])
def test_the_size_of_frames_that_are_no_file(kind: Any):
    assert video_size(kind(frames()), Sampling()) == (5, 16, 24)


@needs_av
def test_limits_are_checked_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch):
    data = encode(frames(20), "mp4", "libx264")
    monkeypatch.setattr(video, "_MAX_SOURCE_FRAMES", 19)
    with pytest.raises(MediaError, match="more than 19 frames"):
        decode_video(data)
    monkeypatch.setattr(video, "_MAX_SOURCE_FRAMES", 20)
    monkeypatch.setattr(video, "_MAX_TAKEN_PIXELS", 5 * 16 * 24 - 1)
    with pytest.raises(MediaError, match="sample fewer frames"):
        decode_video(data, Sampling(5))
    assert len(decode_video(data, Sampling(4)).indices) == 4


@needs_av
@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=6), st.sampled_from(FILES))
def test_damaged_files_raise_nothing_but_media_errors(changes: list[tuple[int, int]], kind: tuple[str, str]):
    data = bytearray(encode(frames(4), *kind))
    for at, value in changes:
        data[at % len(data)] = value
    try:
        decode_video(bytes(data), Sampling(2))
    except MediaError as error:
        assert "0x" not in str(error)  # noqa: PT017

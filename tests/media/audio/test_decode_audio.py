"""Sounds become mono samples of the model's rate, whatever their format; what is damaged or too large is refused."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.blocks import AudioLimits
from jaxllm.media.audio.decode import decode_audio
from jaxllm.media.errors import MediaError
from tests.media.forged import box, forged_mov, forged_vorbis, page
from tests.media.sounds import contain, encode, film, tones, wav

RATE = 16_000
EXACT = {
    "WAV": ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"),
    "WAVEX": ("PCM_16", "FLOAT"),
    "RF64": ("PCM_16",),
    "FLAC": ("PCM_16", "PCM_24"),
}
"""libsndfile's names of formats and subtypes that keep a sound, up to their number of bits."""
LOSSY = (("WAV", "ULAW"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"))
CONTAINERS = (("mov", "pcm_s16le"), ("mp4", "aac"), ("mov", "alac"), ("matroska", "flac"), ("webm", "libopus"))


def mono(samples_nc: np.ndarray) -> np.ndarray:
    return samples_nc.astype(np.float64).mean(axis=1)


def loudness(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(samples))))


# Formats


@pytest.mark.parametrize("num_channels", [1, 2, 8])
@pytest.mark.parametrize(("form", "subtype"), [(form, subtype) for form in EXACT for subtype in EXACT[form]])
def test_files_that_keep_a_sound(form: str, subtype: str, num_channels: int):
    samples = tones(0.7, RATE, num_channels)
    decoded = decode_audio(encode(samples, RATE, form, subtype), RATE)
    assert (decoded.dtype, decoded.ndim) == (np.float32, 1)
    step = {"PCM_U8": 2.0**-7, "PCM_16": 2.0**-15}.get(subtype, 2.0**-22)
    np.testing.assert_allclose(decoded, mono(samples), rtol=0, atol=step)


@pytest.mark.parametrize(("form", "subtype"), LOSSY)
def test_files_that_keep_what_is_heard(form: str, subtype: str):
    samples = tones(0.7, RATE, 2)
    decoded = decode_audio(encode(samples, RATE, form, subtype), RATE)
    assert len(decoded) == len(samples)
    assert loudness(decoded - mono(samples)) < 0.3 * loudness(samples)


@pytest.mark.parametrize("num_channels", [1, 2])
@pytest.mark.parametrize(("form", "codec"), CONTAINERS)
def test_containers(form: str, codec: str, num_channels: int):
    samples = tones(0.7, 48_000, num_channels)
    decoded = decode_audio(contain(samples, 48_000, form, codec), RATE)
    expected = decode_audio((mono(samples), 48_000), RATE)
    assert len(expected) <= len(decoded) < len(expected) + 0.1 * RATE
    assert loudness(decoded[: len(expected)] - expected) < 0.3 * loudness(samples)


def test_the_first_sound_of_a_film_with_eight_channels():
    samples = tones(0.3, RATE, 8)
    decoded = decode_audio(contain(samples, RATE, "matroska", "flac"), RATE)
    np.testing.assert_allclose(decoded, mono(samples), rtol=0, atol=2**-15)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_arrays(dtype: Any):
    samples = tones(0.7, RATE, 3).astype(dtype)
    for value in (samples, samples.T, (samples, RATE), (samples.T, float(RATE)), (mono(samples), np.int64(RATE))):
        np.testing.assert_allclose(decode_audio(value, RATE), mono(samples), rtol=0, atol=1e-3)
    np.testing.assert_array_equal(decode_audio(samples[:, 0], RATE), samples[:, 0].astype(np.float32))
    short = samples[:1, 0]
    np.testing.assert_array_equal(decode_audio(short, RATE), short.astype(np.float32))


# Rates


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 24_000, 32_000, 44_100, 44_101, 48_000, 96_000, 192_000])
def test_other_rates(rate: int):
    """Tones below the lower rate's limit are the same tones."""
    length = 1.0
    at, to = np.arange(int(length * rate)) / rate, np.arange(int(length * RATE)) / RATE
    chance = np.random.default_rng()
    tone = [(chance.uniform(50, 3200), chance.uniform(0, 7)) for _ in range(5)]
    source, expected = (
        sum(np.sin(2 * np.pi * frequency * t + phase) for frequency, phase in tone) / 5 * np.hanning(len(t))
        for t in (at, to)
    )
    decoded = decode_audio((source, rate), RATE)
    assert len(decoded) == pytest.approx(len(expected), abs=1)
    shared = min(len(decoded), len(expected))
    assert loudness(decoded[:shared] - expected[:shared]) < 1e-3 * loudness(expected)


def test_what_a_lower_rate_cannot_carry_is_left_out():
    t = np.arange(48_000) / 48_000
    high = np.sin(2 * np.pi * np.random.default_rng().uniform(8800, 20_000) * t) * np.hanning(len(t))
    assert loudness(decode_audio((high, 48_000), RATE)) < 1e-5


def test_files_and_arrays_of_another_rate_give_the_same():
    """Both come in blocks, and no seam is heard."""
    samples = tones(3.0, 44_100, 2)
    whole = decode_audio((samples, 44_100), RATE)
    np.testing.assert_array_equal(decode_audio(encode(samples, 44_100, "WAV", "FLOAT"), RATE), whole)
    np.testing.assert_allclose(decode_audio(contain(samples, 44_100, "mov", "alac"), RATE), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "rate", [0, 1, 999, 384_001, 655_350, -16_000, float("nan"), float("inf"), True, "16000", None]
)
def test_rates_that_no_sound_has(rate: Any):
    with pytest.raises(MediaError, match="samples a second"):
        decode_audio((np.zeros(100), rate), RATE)


def test_a_forged_rate_in_a_header():
    for rate in (1, 999, 655_350):
        with pytest.raises(MediaError, match=f"has {rate:,} samples a second"):
            decode_audio(wav(bytes(400), rate), RATE)


# What is no sound


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"just a text that was renamed to a.wav", b"#EXTM3U\nhttp://example.com/a.mp3", b"%PDF-1.4", b"\xff"],
)
def test_other_files_are_refused(data: bytes):
    with pytest.raises(MediaError, match="the audio is not a WAV, FLAC"):
        decode_audio(data, RATE)


@pytest.mark.parametrize(
    "start", [b"RIFF", b"RIFF\0\0\0\0AVI ", b"RIFF\0\0\0\0WEBPVP8X", b"RF64", b"fLaC", b"OggS", b"\xff\xfb\x90\x44"]
)
def test_a_beginning_alone_is_refused(start: bytes):
    with pytest.raises(MediaError, match="damaged"):
        decode_audio(start + b"text " * 1000, RATE)


@pytest.mark.parametrize("start", [b"\0\0\0\x18ftypM4A ", b"\x1aE\xdf\xa3"])
def test_a_beginning_of_a_container_is_refused(start: bytes):
    with pytest.raises(MediaError, match=r"damaged|no audio"):
        decode_audio(start + b"text " * 1000, RATE)


def test_a_film_without_sound_is_refused():
    with pytest.raises(MediaError, match="no audio in it"):
        decode_audio(film(), RATE)


def test_containers_need_pyav(monkeypatch: pytest.MonkeyPatch):
    data = contain(tones(0.1, RATE), RATE, "mp4", "aac")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(VLLMValidationError, match=r"needs PyAV: pip install 'jaxllm\[video\]', or send a WAV"):
        decode_audio(data, RATE)


@pytest.mark.parametrize("value", [None, "a.wav", 1.0, [0.0, 1.0], {}])
def test_other_objects_are_refused(value: Any):
    with pytest.raises(MediaError, match="must be bytes, an array of floats"):
        decode_audio(value, RATE)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint8, bool, np.complex64])
def test_other_arrays_are_refused(dtype: Any):
    with pytest.raises(MediaError, match="must be floats from -1 to 1"):
        decode_audio(np.zeros(100, dtype), RATE)


@pytest.mark.parametrize("shape", [(), (3, 4), (9, 100), (100, 100), (2, 100, 1), (0, 3), (100, 0)])
def test_arrays_of_other_shapes_are_refused(shape: tuple[int, ...]):
    with pytest.raises(MediaError, match=r"must be \[n\], \[channels, n\]|no samples"):
        decode_audio(np.zeros(shape), RATE)


def test_no_samples():
    empty = np.zeros((0, 1), np.float32)
    for value in (empty[:, 0], (empty[:, 0], 44_100), encode(empty, RATE), wav(b"")):
        with pytest.raises(MediaError, match="no samples"):
            decode_audio(value, RATE)


def test_one_sample():
    sample = np.array([[0.5]], np.float32)
    for data in (sample[0], encode(sample, RATE), encode(sample, RATE, "FLAC"), wav(sample.tobytes())):
        assert decode_audio(data, RATE).tolist() == [0.5]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("rate", [RATE, 48_000])
def test_samples_that_are_no_finite_numbers(value: float, rate: int):
    for at in (0, 700, -1):
        samples = tones(0.5, rate, 2).astype(np.float64)
        samples[at, 1] = value
        with np.errstate(over="ignore"):
            narrow = samples.astype(np.float32)
        for audio in ((samples, rate), wav(narrow.tobytes(), rate, channels=2)):
            with pytest.raises(MediaError, match="infinite or not a number"):
                decode_audio(audio, RATE)


# Headers that lie


def test_a_wav_header_that_announces_more_than_there_is():
    data = tones(0.1, RATE).tobytes()
    for size in (len(data) + 1, len(data) + 4000, 2**30):
        with pytest.raises(MediaError, match="ends before its header says"):
            decode_audio(wav(data, size=size), RATE)


def test_a_wav_header_that_announces_less_than_there_is():
    samples = tones(0.1, RATE)
    np.testing.assert_array_equal(decode_audio(wav(samples.tobytes(), size=400), RATE), samples[:100, 0])


@pytest.mark.parametrize("size", [0xFFFF_FFFF, 0x7FFF_FFFF, 0x7FFF_F000])
def test_a_wav_file_from_a_pipe_has_no_length(size: int):
    samples = tones(0.1, RATE)
    np.testing.assert_array_equal(decode_audio(wav(samples.tobytes(), size=size), RATE), samples[:, 0])


def test_a_wav_file_of_very_many_chunks():
    data = wav(bytes(400))
    with pytest.raises(MediaError, match="more than 1,000 chunks"):
        decode_audio(data[:12] + b"note\0\0\0\0" * 1000 + data[12:], RATE)


@pytest.mark.parametrize("channels", [0, 9, 1000, 65_535])
def test_a_header_of_too_few_or_too_many_channels(channels: int):
    with pytest.raises(MediaError, match=r"channels|damaged"):
        decode_audio(wav(bytes(8 * 65_535), channels=channels, kind=1, bits=16), RATE)


def with_length(flac: bytes, num_samples: int) -> bytes:
    """Return a FLAC file whose header announces a number of samples: the low 36 bits of bytes 18 to 25."""
    fields = int.from_bytes(flac[18:26], "big")
    return flac[:18] + ((fields >> 36 << 36) | num_samples).to_bytes(8, "big") + flac[26:]


def test_a_flac_header_that_announces_another_length():
    samples = tones(0.5, RATE)
    data = encode(samples, RATE, "FLAC")
    assert with_length(data, len(samples)) == data
    for length in (len(samples) + 1, 2**35, 2**36 - 1):
        with pytest.raises(MediaError, match=r"ends before its header says|damaged"):
            decode_audio(with_length(data, length), RATE)
    assert len(decode_audio(with_length(data, 100), RATE)) <= len(samples)
    with pytest.raises(MediaError, match="does not say its length"):
        decode_audio(with_length(data, 0), RATE)


INDEX = box("sidx", struct.pack(">IIIIIHH", 0, 1, 1000, 0, 0, 0, 20_000), struct.pack(">III", 9, 9, 0) * 20_000)
LATE_INDEX = box(
    "sidx", struct.pack(">IIIQQHH", 1 << 24, 1, 1000, 0, 0, 0, 20_000), struct.pack(">III", 9, 9, 0) * 20_000
)
LONG_CHUNKS = box("stsc", struct.pack(">IIIII", 0, 1, 1, 2**31, 1)) + box("stco", bytes(7) + b"\xff" + bytes(1020))
FORGED: dict[str, dict[str, Any]] = {
    "samples": {"num_samples": 170_000_000, "chunk": 170_000_000},
    "chunks": {
        "extra": box("stsc", struct.pack(">IIIII", 0, 1, 1, 2**31, 1)) + box("stco", bytes(7) + b"\xff" + bytes(1020))
    },
    "edits": {"num_samples": 400, "num_edits": 100_000},
    "fragments": {"extra": box("trun", struct.pack(">II", 0, 170_000_000))},
    "more samples": {"extra": box("stz2", struct.pack(">III", 0, 8, 2**32 - 1))},
    "segments of many tracks": {"num_tracks": 500, "extra": INDEX},
    "long times of segments": {"num_tracks": 500, "extra": LATE_INDEX},
    "fragments of many tracks": {"num_tracks": 500, "extra": box("moof") * 20_000},
    "an index of fragments": {"num_tracks": 500, "extra": box("tfra", struct.pack(">IIII", 0, 1, 0, 2**31))},
    "a compressed header": {"extra": box("cmov", b"x")},
}


@pytest.mark.parametrize("name", FORGED)
def test_tables_that_announce_more_than_there_is(name: str):
    """FFmpeg would make entries for all samples that are announced."""
    with pytest.raises(MediaError, match=r"tables announce more than it has|header is compressed"):
        decode_audio(forged_mov(**FORGED[name]), RATE)


def test_tables_are_looked_for_outside_the_sound():
    assert len(decode_audio(forged_mov(), RATE)) == 400
    assert len(decode_audio(forged_mov(num_edits=2), RATE)) >= 400
    samples = tones(0.5, RATE)
    data = contain(samples, RATE, "mov", "pcm_s16le")
    at = data.index(b"mdat") + 4
    hidden = box("stsz", struct.pack(">III", 0, 1, 2**32 - 1))
    decoded = decode_audio(data[:at] + hidden + data[at + len(hidden) :], RATE)
    np.testing.assert_allclose(decoded[20:], samples[20:, 0], rtol=0, atol=2**-15)


TAG = b"ID3\4\0\0\0\0\0\5hello"


@pytest.mark.parametrize("start", [b"", TAG, TAG * 3], ids=["alone", "after a tag", "after three tags"])
@pytest.mark.parametrize(("num_books", "log_entries"), [(1, 20), (8, 20), (256, 22), (200, 12)])
def test_codebooks_that_expand(num_books: int, log_entries: int, start: bytes):
    """libvorbis would overflow the stack, or take gigabytes."""
    with pytest.raises(MediaError, match="codebooks are too large"):
        decode_audio(start + forged_vorbis(num_books, log_entries), RATE)


@pytest.mark.parametrize("ordered", [True, False])
def test_many_small_codebooks_are_followed_to_a_large_one(ordered: bool):
    assert len(decode_audio(forged_vorbis(4, 10), RATE)) > 0
    with pytest.raises(MediaError, match="codebooks are too large"):
        decode_audio(forged_vorbis(200, 10, ordered=ordered), RATE)


def test_ogg_headers_that_libogg_would_skip_over():
    """Behind what it skips there could be other headers."""
    good, hidden = encode(tones(0.1, RATE), RATE, "OGG"), forged_vorbis(8, 20)
    damaged = bytearray(good)
    damaged[40] ^= 1
    junk = good[:58] + b"junk" + good[58:]
    for data in (
        bytes(damaged) + hidden,
        junk,
        page([b"a"], 1) + hidden,
        good[:58] + page([b"a"], 5) + hidden,
        good[:100],
    ):
        with pytest.raises(MediaError, match="the Ogg file's headers are damaged or end early"):
            decode_audio(data, RATE)
    for first in (b"fishead\0" + bytes(56), b"\x80theora\3\2\1" + bytes(40)):
        with pytest.raises(MediaError, match="damaged"):
            decode_audio(page([first], 0, stream=1, flags=2) + hidden, RATE)
    assert len(decode_audio(good + hidden, RATE)) == len(decode_audio(good, RATE)), "a second stream is read"


def test_tags_before_a_sound_are_left_out():
    for form in ("MP3", "FLAC", "WAV", "OGG"):
        data = encode(tones(0.3, RATE), RATE, form)
        np.testing.assert_array_equal(decode_audio(TAG * 2 + data, RATE), decode_audio(data, RATE))
    with pytest.raises(MediaError, match="more than 100 ID3 tags"):
        decode_audio(TAG * 101, RATE)


def test_a_file_of_very_many_boxes():
    with pytest.raises(MediaError, match="more than 100,000 boxes"):
        decode_audio(box("ftyp", b"qt  ") + box("free") * 200_000, RATE)


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_truncated_files_are_refused(form: str):
    data = encode(tones(0.5, RATE, 2), RATE, form)
    for share in range(1, 10):
        with pytest.raises(MediaError, match=r"damaged|ends before|no samples"):
            decode_audio(data[: len(data) * share // 10], RATE)


@pytest.mark.parametrize("form", ["OGG", "MP3", "mp4", "mov", "webm", "matroska"])
def test_truncated_streams_are_shorter_or_refused(form: str):
    samples = tones(0.5, RATE, 2)
    data = encode(samples, RATE, form) if form.isupper() else contain(samples, 48_000, form, dict(CONTAINERS)[form])
    for share in range(1, 10):
        try:
            decoded = decode_audio(data[: len(data) * share // 10], RATE)
        except MediaError:
            continue
        assert len(decoded) <= 1.2 * len(samples)


FILES = {
    "WAV": lambda: encode(tones(0.1, RATE, 2), RATE),
    "FLAC": lambda: encode(tones(0.1, RATE, 2), RATE, "FLAC"),
    "OGG": lambda: encode(tones(0.1, RATE, 2), RATE, "OGG"),
    "MP3": lambda: encode(tones(0.1, RATE, 2), RATE, "MP3"),
    "MP4": lambda: contain(tones(0.1, RATE, 2), RATE, "mp4", "aac"),
    "WebM": lambda: contain(tones(0.1, 48_000, 2), 48_000, "webm", "libopus"),
}


@pytest.mark.parametrize("form", FILES)
def test_damaged_files_raise_nothing_but_media_errors(form: str):
    """A few hundred files with random bytes in their headers."""
    chance = random.Random()
    good = FILES[form]()
    for _ in range(200):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 300))] = chance.randrange(256)
        is_sound_or_refused(bytes(data))


@settings(max_examples=150)
@given(
    st.sampled_from((b"", b"RIFF\x20\0\0\0WAVEfmt ", b"fLaC\0\0\0\x22", b"OggS\0\2", b"ID3\4\0", b"\xff\xfb")),
    st.binary(max_size=200),
)
def test_random_headers_raise_nothing_but_media_errors(start: bytes, data: bytes):
    is_sound_or_refused(start + data)


def is_sound_or_refused(data: bytes) -> None:
    try:
        samples = decode_audio(data, RATE)
    except MediaError as error:
        assert not {"0x", "<", "object"} & set(str(error).split())  # noqa: PT017
    else:
        assert samples.dtype == np.float32
        assert np.isfinite(samples).all()


# Limits


@contextmanager
def allocating_at_most(num_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_the_limit_of_seconds():
    limits = AudioLimits(max_seconds=0.5)
    samples = tones(0.5, 48_000, 2)
    assert len(decode_audio((samples, 48_000), RATE, limits)) == 8000
    longer = np.concatenate([samples, samples[:1]])
    for value in ((longer, 48_000), encode(longer, 48_000), encode(longer, 48_000, "FLAC")):
        with pytest.raises(MediaError, match=r"longer than 0.5 s: send a shorter one"):
            decode_audio(value, RATE, limits)


def test_the_limit_of_bytes():
    samples = tones(0.5, RATE, 2)
    assert len(decode_audio(samples, RATE, AudioLimits(None, 32_000))) == 8000
    for value in (samples, encode(samples, RATE, "FLAC")):
        with pytest.raises(MediaError, match="more than 31,999 bytes, which are 0 s at 16,000 samples a second"):
            decode_audio(value, RATE, AudioLimits(None, 31_999))


def silence(seconds: int, rate: int, channels: int) -> bytes:
    """Return a FLAC file of silence."""
    return encode(np.zeros((seconds * rate, channels), np.int16), rate, "FLAC")


def test_hours_of_silence_in_a_flac_file_take_no_memory():
    data = silence(2 * 3600, 8000, 1)
    assert len(data) < 200_000
    with allocating_at_most(45 << 20), pytest.raises(MediaError, match="longer than 600 s"):
        decode_audio(data, RATE)
    with allocating_at_most(12 << 20), pytest.raises(MediaError, match="more than 8,388,608 bytes"):
        decode_audio(data, RATE, AudioLimits(None, 8 << 20))


def test_very_many_samples_in_a_short_time_take_no_memory():
    """384,000 samples a second of 8 channels: 600 s of them would be 7 GB."""
    data = silence(2, 384_000, 8)
    assert len(data) < 20_000
    with allocating_at_most(8 << 20):
        assert len(decode_audio(data, RATE)) == 2 * RATE
    limits = AudioLimits(max_values=5_000_000)
    with allocating_at_most(8 << 20), pytest.raises(MediaError, match="more than 5,000,000 samples in all channels"):
        decode_audio(data, RATE, limits)


def test_an_hour_of_silence_in_an_opus_file_takes_no_memory():
    quiet = np.zeros((48_000, 1), np.float32)
    data = contain(quiet, 48_000, "webm", "libopus", times=3600)
    with allocating_at_most(6 << 20), pytest.raises(MediaError, match="longer than 20 s"):
        decode_audio(data, RATE, AudioLimits(20))


def test_libsndfile_reads_mp3():
    """Versions before 1.1 do not."""
    assert "MP3" in soundfile.available_formats()

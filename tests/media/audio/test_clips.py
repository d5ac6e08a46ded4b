"""Long sounds are cut where vLLM cuts them."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.media.audio.clips import split_clips

RATE = 16_000


def vllm_ends(samples: np.ndarray, clip: int, overlap: int, window: int = 1600) -> list[int]:
    """Return where clips end, by vLLM's description: window for window."""
    ends, start = [], 0
    while start + clip < len(samples):
        first, last = start + clip - overlap, start + clip
        loudness = {
            at: np.sqrt(np.mean(samples[at : at + window].astype(np.float64) ** 2))
            for at in range(first, last - window, window)
        }
        start = min(loudness, key=lambda at: loudness[at])
        ends.append(start)
    return [*ends, len(samples)]


def ends(clips: list[np.ndarray]) -> list[int]:
    return np.cumsum([len(clip) for clip in clips]).tolist()


def speech(seconds: float) -> np.ndarray:
    """Return noise with pauses of random lengths."""
    chance = np.random.default_rng()
    count = int(seconds * RATE)
    loudness = np.repeat(chance.uniform(0.001, 1, int(seconds * 20) + 1), RATE // 20)[:count]
    return (chance.standard_normal(count) * loudness).astype(np.float32)


@pytest.mark.parametrize("seconds", [0, 0.5, 29.9, 30, 30.01, 31, 59.5, 60, 200])
def test_the_clips_are_the_sound_and_end_where_vllm_ends_them(seconds: float):
    samples = speech(seconds)
    clips = split_clips(samples, RATE)
    np.testing.assert_array_equal(np.concatenate(clips), samples)
    assert all(np.shares_memory(clip, samples) for clip in clips if len(samples))
    assert all(29 * RATE <= len(clip) <= 30 * RATE for clip in clips[:-1])
    assert len(clips[-1]) <= 30 * RATE
    assert ends(clips) == vllm_ends(samples, 30 * RATE, RATE)


def test_other_lengths():
    samples = speech(20)
    for clip, overlap in ((3, 1), (2.5, 0.25), (1, 1 - 1e-3), (7, 0.11)):
        clips = split_clips(samples, RATE, clip_seconds=clip, overlap_seconds=overlap)
        assert ends(clips) == vllm_ends(samples, int(clip * RATE), int(overlap * RATE))


def test_a_pause_is_found():
    samples = np.ones(40 * RATE, np.float32)
    at = 29 * RATE + 1600 * int(np.random.default_rng().integers(0, 9))
    samples[at : at + 1600] = 0
    assert ends(split_clips(samples, RATE)) == [at, len(samples)]


def test_silence_and_what_is_everywhere_as_loud_are_cut_as_early_as_they_may():
    for samples in (np.zeros(70 * RATE, np.float32), np.ones(70 * RATE, np.float32)):
        assert ends(split_clips(samples, RATE)) == [29 * RATE, 58 * RATE, 70 * RATE]


@pytest.mark.parametrize("overlap", [0, 0.05, 0.1])
def test_an_overlap_without_a_whole_window_is_cut_at_its_beginning(overlap: float):
    samples = speech(70)
    first = int(30 * RATE) - int(overlap * RATE)
    assert ends(split_clips(samples, RATE, overlap_seconds=overlap)) == [first, 2 * first, len(samples)]

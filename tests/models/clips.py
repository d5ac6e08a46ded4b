"""Clips of sound that are drawn from a seed: HF's process draws the same."""

from __future__ import annotations

import numpy as np

RATE = 16_000
"""Samples a second."""
NUM_FRAMES = 50
"""The frames that tiny encoders make of a clip, which is filled up to a second."""


def draw_clip(seconds: float, seed: int) -> np.ndarray:
    """Return float32 samples [n] of a few tones that rise or fall, with noise, between -1 and 1."""
    rng = np.random.default_rng([seed, 3])
    times = np.arange(round(seconds * RATE)) / RATE
    samples = 0.01 * rng.standard_normal(len(times))
    for _ in range(5):
        start, end, size = rng.uniform(80, 4000), rng.uniform(80, 4000), rng.uniform(0.02, 0.18)
        phase = start * times + (end - start) * times**2 / (2 * max(seconds, 1e-6))
        samples += size * np.sin(2 * np.pi * phase)
    return samples.clip(-1, 1).astype(np.float32)


def unpack_speech(sound: np.ndarray) -> np.ndarray:
    """Return float32 samples [2 * n] of speech in mu-law, uint8 [n] at half the rate."""
    codes = ~sound
    sizes = ((((codes & 15) << 3) + 132).astype(np.int32) << ((codes >> 4) & 7)) - 132
    samples = np.where(codes & 128, -sizes, sizes) / 32_768
    times = np.arange(len(samples))
    return np.interp(np.arange(2 * len(samples)) / 2, times, samples).astype(np.float32)

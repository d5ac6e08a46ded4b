"""Log-mel spectrograms of sound at 16 kHz, as Whisper's feature extractor makes them. numpy only."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

RATE = 16_000
"""Samples a second."""
HOP = 160
"""Samples between two columns."""
_WINDOW = 400


def log_mel(samples: np.ndarray, num_mels: int) -> np.ndarray:
    """Return a float32 spectrogram [num_mels, n // HOP] of float32 samples [n] between -1 and 1."""
    padded = np.pad(samples.astype(np.float64), _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP][: len(samples) // HOP]
    window = np.hanning(_WINDOW + 1)[:-1]
    power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2
    mels = np.log10(np.maximum(_filters(num_mels) @ power.T, 1e-10))
    return ((np.maximum(mels, mels.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=4)
def _filters(num_mels: int) -> np.ndarray:
    """Return Slaney's triangular filters [num_mels, 201] from 0 to 8,000 Hz, each of unit area."""
    bins = np.linspace(0, RATE / 2, _WINDOW // 2 + 1)
    edges = _to_hertz(np.linspace(0, _to_mel(RATE / 2), num_mels + 2))
    slopes = edges[:, None] - bins[None]
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return triangles * (2 / (edges[2:] - edges[:-2]))[:, None]


def _to_mel(hertz: float) -> float:
    """Return mels of 1,000 Hz or more: linear up to there, then 27 steps of the logarithm of 6.4."""
    return 15 + 27 / np.log(6.4) * np.log(hertz / 1000)


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15, 200 / 3 * mels, 1000 * np.exp(np.log(6.4) / 27 * (mels - 15)))

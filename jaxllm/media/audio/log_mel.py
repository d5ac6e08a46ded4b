"""Whisper's features of a sound: the logarithm of its energy in mel bands, 100 times a second."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

RATE = 16_000
"""The samples a second of the sounds that features are made of."""
CLIP_SAMPLES = 30 * RATE
"""The samples that Whisper's encoder takes: shorter clips are followed by silence."""
HOP = 160
"""The samples between two columns of features."""
_WINDOW = 400
_FLOOR = 1e-10
"""The energy of silence."""
_RANGE = 8.0
"""How far below the loudest value others are raised to, in powers of ten."""
_BLOCK = 128
"""The frames that are transformed at once: they stay in a core's cache."""


def log_mel(samples: np.ndarray, num_mels: int, num_samples: int | None = None) -> np.ndarray:
    """Return the features of a sound, as HF's WhisperFeatureExtractor makes them: float32 [num_mels, frames].

    `samples` are float32 [n], 16,000 a second, and silence follows them up to `num_samples`: CLIP_SAMPLES for a model
    that takes clips of 30 s. There is a frame for each 160 samples; what is left over has none. Raises ValueError for
    fewer than 160 samples, and for more samples than `num_samples`.
    """
    num_samples = len(samples) if num_samples is None else num_samples
    num_frames = num_samples // HOP
    if num_frames == 0 or len(samples) > num_samples:
        raise ValueError(f"{len(samples)} samples make no features of {num_samples} samples")
    silence = num_samples - len(samples)
    half = _WINDOW // 2
    # The sound is mirrored at both ends. Of the silence after it, the last frame with sound sees no more than a window.
    padded = np.pad(samples, (0, min(silence, _WINDOW)))
    padded = np.pad(padded, half, mode="reflect")
    heard = min(num_frames, -(-(len(samples) + half) // HOP))
    frames_tw = sliding_window_view(padded, _WINDOW)[::HOP][:heard]
    features_mt = np.full((num_mels, num_frames), np.log10(_FLOOR), np.float32)
    window = _window()
    for start in range(0, heard, _BLOCK):
        end = min(start + _BLOCK, heard)
        spectrum_tf = np.fft.rfft(frames_tw[start:end] * window)
        energy_ft = np.ascontiguousarray((spectrum_tf.real**2 + spectrum_tf.imag**2).T)
        for parity in (0, 1):
            weights_f, firsts = _apart(num_mels, parity)
            energy_mt = np.add.reduceat(energy_ft * weights_f[:, None], firsts)
            features_mt[parity::2, start:end] = np.log10(np.maximum(energy_mt, _FLOOR))
    np.maximum(features_mt, features_mt.max() - np.float32(_RANGE), out=features_mt)
    features_mt += 4.0
    features_mt /= 4.0
    return features_mt


@cache
def _window() -> np.ndarray:
    """Return a periodic Hann window [w]."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)


@lru_cache(maxsize=8)  # models have 80 bands or 128
def _apart(num_mels: int, parity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of frequencies [f] in every second mel band, and the first frequency of each of these bands.

    They do not overlap, so that no matrix product is needed: its threads would wait for cores that others use.
    """
    filters_mf = mel_filters(num_mels)[parity::2]
    return filters_mf.sum(axis=0), (filters_mf > 0).argmax(axis=1)


@lru_cache(maxsize=8)
def mel_filters(num_mels: int) -> np.ndarray:
    """Return the weights of frequencies in each mel band [m, f], as in Slaney's Auditory Toolbox.

    Bands are triangles with the same area. Their centres are at equal distances below 1,000 Hz and at equal ratios
    above it. Raises ValueError for bands that are too narrow to have a frequency each.
    """
    edges = _hertz(np.linspace(0.0, _mels(RATE / 2), num_mels + 2))
    rising, falling = edges[1:-1] - edges[:-2], edges[2:] - edges[1:-1]
    frequencies = np.linspace(0, RATE / 2, _WINDOW // 2 + 1)
    up_mf = (frequencies - edges[:-2, None]) / rising[:, None]
    down_mf = (edges[2:, None] - frequencies) / falling[:, None]
    triangles_mf = np.maximum(0, np.minimum(up_mf, down_mf))
    if not triangles_mf.any(axis=1).all():
        raise ValueError(f"{num_mels} mel bands are too narrow to have a frequency each")
    return triangles_mf * (2 / (rising + falling))[:, None]


_LINEAR = 3 / 200
"""The mels of a hertz below 1,000 Hz."""
_RATIO = 27 / np.log(6.4)
"""The mels in which a frequency above 1,000 Hz grows by e."""


def _mels(frequency: float) -> float:
    """Return the mels of a frequency above 1,000 Hz."""
    return 1000 * _LINEAR + _RATIO * np.log(frequency / 1000)


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 1000 * _LINEAR, mels / _LINEAR, 1000 * np.exp((mels - 1000 * _LINEAR) / _RATIO))

"""Features of sounds are those of HF's WhisperFeatureExtractor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from jaxllm.media.audio.log_mel import CLIP_SAMPLES, RATE, log_mel, mel_filters

NUM_MELS = (80, 128)


def sounds() -> dict[str, np.ndarray]:
    """Return sounds of many kinds: float32 [n], at most 30 s."""
    rng = np.random.default_rng()
    t = np.arange(CLIP_SAMPLES) / RATE
    noise = rng.standard_normal(CLIP_SAMPLES)
    voiced = np.sin(2 * np.pi * 120 * t[:90_000]) + 0.3 * noise[:90_000]
    made = {
        "noise": 0.1 * noise,
        "tone": np.sin(2 * np.pi * 440 * t),
        "sweep": 0.9 * np.sin(2 * np.pi * (50 * t + 130 * t * t)),
        "bursts": voiced * (np.sin(2 * np.pi * 1.7 * t[:90_000]) > 0),
        "silence": np.zeros(20_000),
        "click": np.eye(1, 5000, 2500).ravel(),
        "loud": 1000 * noise[:4321],
        "faint": 1e-6 * noise[:4321],
        **{f"{length} samples": noise[:length] for length in (1, 159, 201, 401)},
        **{f"{missing} samples less": 0.1 * noise[missing:] for missing in (1, 199, 400)},
    }
    return {name: sound.astype(np.float32) for name, sound in made.items()}


@pytest.mark.parametrize("num_mels", NUM_MELS)
def test_clips_of_30_seconds(num_mels: int):
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    for name, samples in sounds().items():
        features = log_mel(samples, num_mels, CLIP_SAMPLES)
        [expected] = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features
        assert (features.shape, features.dtype) == ((num_mels, 3000), np.float32)
        np.testing.assert_allclose(features, expected, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("num_mels", NUM_MELS)
@pytest.mark.parametrize("length", [160, 201, 399, 480, 16_000, 16_159, 700_001])
def test_sounds_of_any_length(num_mels: int, length: int):
    samples = np.random.default_rng().standard_normal(length).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    features = log_mel(samples, num_mels)
    [expected] = extractor(
        samples, sampling_rate=RATE, return_tensors="np", padding="do_not_pad", truncation=False
    ).input_features
    assert features.shape == (num_mels, length // 160)
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_mels", NUM_MELS)
def test_silence_after_a_sound_is_as_zeros_in_it(num_mels: int):
    samples = np.random.default_rng().standard_normal(5000).astype(np.float32)
    for zeros in (1, 100, 199, 200, 201, 399, 400, 3000):
        features = log_mel(np.pad(samples, (0, zeros)), num_mels)
        np.testing.assert_array_equal(log_mel(samples, num_mels, 5000 + zeros), features)


def test_samples_are_not_changed():
    samples = np.random.default_rng().standard_normal(5000).astype(np.float32)
    before = samples.copy()
    log_mel(samples, 80, CLIP_SAMPLES)
    np.testing.assert_array_equal(samples, before)


@pytest.mark.parametrize(("length", "num_samples"), [(0, None), (159, None), (0, 159), (161, 160)])
def test_lengths_without_features(length: int, num_samples: int | None):
    with pytest.raises(ValueError, match=f"^{length} samples make no features"):
        log_mel(np.zeros(length, np.float32), 80, num_samples)


@pytest.mark.parametrize("num_mels", [1, 40, *NUM_MELS])
def test_bands(num_mels: int):
    expected = WhisperFeatureExtractor(feature_size=num_mels).mel_filters
    np.testing.assert_allclose(mel_filters(num_mels).T, expected, rtol=0, atol=1e-15)


def test_too_many_bands():
    with pytest.raises(ValueError, match=r"^300 mel bands are too narrow"):
        mel_filters(300)

"""Gemma 4's features of sounds equal those of HF's feature extractor, and their rows those of HF's processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import Gemma4AudioFeatureExtractor

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.audio.gemma4 import KIND
from jaxllm.media.audio.processor import make_audio_processor
from jaxllm.media.rules import Clips, find_rule

SETTINGS = {"feature_extractor_type": KIND, "feature_size": 128, "fft_length": 512, "frame_length": 320}
CONFIG: dict[str, Any] = {"model_type": "gemma4", "vision_config": {}, "audio_config": {"model_type": "gemma4_audio"}}


@pytest.mark.parametrize("num_samples", [161, 320, 321, 640, 641, 15_999, 16_001, 33_333, 480_000])
@pytest.mark.parametrize("num_mels", [32, 128])
def test_features_are_hf_s(num_samples: int, num_mels: int) -> None:
    samples = (0.2 * np.random.default_rng().standard_normal(num_samples)).astype(np.float32)
    processor = make_audio_processor({**SETTINGS, "feature_size": num_mels}, Clips())
    item = processor.process(samples)
    heard = Gemma4AudioFeatureExtractor(feature_size=num_mels)([samples])
    mask_t, expected_tm = np.asarray(heard["input_features_mask"][0]), np.asarray(heard["input_features"][0])
    columns_tm = item.patches.reshape(-1, num_mels)
    assert columns_tm.shape[0] % 4 == 0
    np.testing.assert_allclose(columns_tm[: mask_t.sum()], expected_tm[mask_t], rtol=0, atol=1e-6)
    assert not columns_tm[mask_t.sum() :].any()
    rows = mask_t[::2][::2].sum()  # as HF's processor counts them
    assert find_rule(CONFIG).pieces(item.shape) == ["<|audio>", rows, "<audio|>"]


def test_a_sound_without_a_column_has_no_rows() -> None:
    """So that it is refused as too short."""
    assert find_rule(CONFIG).count_rows(make_audio_processor(SETTINGS, Clips()).shape(160)) == 0


def test_sounds_may_have_30_seconds() -> None:
    processor = make_audio_processor(SETTINGS, Clips())
    assert (processor.most_samples, processor.limits.max_seconds) == (480_000, 30)
    assert find_rule(CONFIG).count_rows(processor.shape(480_000)) == 750


@pytest.mark.parametrize("change", [{"dither": 1e-4}, {"mel_floor": 1e-5}, {"per_bin_mean": [0.0]}, {"hop_length": 80}])
def test_other_settings_are_refused_by_name(change: dict[str, Any]) -> None:
    [name] = change
    with pytest.raises(VLLMValidationError, match=f"{KIND} has {name}"):
        make_audio_processor({**SETTINGS, **change}, Clips())


def test_models_without_an_audio_tower_have_no_placeholder() -> None:
    assert "audio" not in find_rule({**CONFIG, "audio_config": None}).placeholders

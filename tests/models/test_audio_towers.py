"""What wrappers' config.json files say about their audio towers, the rows of sounds, and the names of tensors."""

from __future__ import annotations

import copy
import json
from fnmatch import fnmatch
from typing import Any

import numpy as np
import pytest

from jaxllm.loading.safetensors import SafetensorsFile
from jaxllm.media.audio.processor import AudioProcessor
from jaxllm.media.rules import find_rule
from jaxllm.models import ModelSpecs, get_family
from jaxllm.models.towers.layout import count_final_rows, empty_batch, make_batch
from jaxllm.models.towers.settings import Grid, TowerSettings
from jaxllm.models.towers.tower import Tower
from tests.e2e.sound_goldens import FAMILIES, folder

pytestmark = pytest.mark.models

EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
QWEN2_AUDIO = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 1280, "encoder_layers": 32, "num_mel_bins": 128},
    "text_config": {"model_type": "qwen2", "intermediate_size": 11_008, "vocab_size": 156_032},
}
VOXTRAL = {
    "architectures": ["VoxtralForConditionalGeneration"],
    "model_type": "voxtral",
    "audio_config": {"model_type": "voxtral_encoder", "hidden_size": 1280, "intermediate_size": 5120},
    "text_config": {"model_type": "llama", "hidden_size": 3072, "head_dim": 128},
}
GLM_ASR = {
    "architectures": ["GlmAsrForConditionalGeneration"],
    "model_type": "glmasr",
    "audio_config": {"model_type": "glmasr_encoder"},
    "text_config": {"model_type": "llama", "hidden_size": 2048},
}
PUBLISHED = {"qwen2_audio": (QWEN2_AUDIO, 4096), "voxtral": (VOXTRAL, 3072), "glm_asr": (GLM_ASR, 2048)}


def read_hf(family: str) -> dict[str, Any]:
    return json.loads((folder(family) / "config.json").read_text())


def settings_of(hf: dict[str, Any]) -> TowerSettings:
    family = get_family(hf["architectures"][0])
    tower = family.read_config(hf).encoder
    assert tower is not None
    assert hash(tower) == hash(family.read_config(hf).encoder)
    return Tower(ModelSpecs(tower, "bfloat16", family=family.vision)).settings


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seconds", [0.03, 1.0, 12.3456, 30.0])
def test_published_configs_are_read(name: str, seconds: float) -> None:
    """The prompt takes as many rows as the tower gives."""
    hf, width = PUBLISHED[name]
    settings, rule = settings_of(hf), find_rule(hf)
    shape = AudioProcessor(EXTRACTOR, rule.clips).shape(int(seconds * 16_000))
    rows = count_final_rows(settings, [Grid(*grid) for grid in shape.grids], shape.size)
    assert rows == rule.count_rows(shape)
    assert (settings.output_size, settings.patch_dim) == (width, 256)


@pytest.mark.parametrize("name", ["voxtral", "glm_asr"])
def test_a_long_sound_has_several_clips(name: str) -> None:
    hf, _ = PUBLISHED[name]
    settings, rule = settings_of(hf), find_rule(hf)
    shape = AudioProcessor(EXTRACTOR, rule.clips).shape(100 * 16_000 + 1)
    assert shape.grids == ((1, 1, 1500),) * 4
    rows = count_final_rows(settings, [Grid(*grid) for grid in shape.grids], shape.size)
    assert rows == rule.count_rows(shape) == {"voxtral": 1500, "glm_asr": 1250}[name]


REFUSED = [
    ("qwen2_audio", "audio_config", {"encoder_attention_heads": 5}, "is 5, which does not divide hidden_size, 32"),
    ("qwen2_audio", "audio_config", {"scale_embedding": True}, "scale_embedding is True"),
    ("qwen2_audio", "audio_config", {"model_type": "whisper"}, "only qwen2_audio_encoder is supported"),
    ("qwen2_audio", "text_config", {"model_type": "llama"}, "only qwen2 is supported"),
    ("voxtral", "audio_config", {"intermediate_size": 96}, "intermediate_size is 96; four frames of 32 have 128"),
    ("voxtral", "audio_config", {"num_mel_bins": 0}, "num_mel_bins"),
    ("voxtral", "", {"projector_hidden_act": "softplus"}, "projector_hidden_act is 'softplus'"),
    ("glm_asr", "audio_config", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    ("glm_asr", "audio_config", {"rope_parameters": {"rope_type": "dynamite"}}, "rope_type"),
]


@pytest.mark.parametrize(("case", "part", "changes", "message"), REFUSED)
def test_unsupported_values_are_refused_by_name(case: str, part: str, changes: dict[str, Any], message: str) -> None:
    hf = copy.deepcopy(read_hf(case))
    (hf[part] if part else hf).update(changes)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        get_family(hf["architectures"][0]).read_config(hf)


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_are_read_under_both_names(name: str) -> None:
    """A checkpoint has the names of the hub, or those of HF's modules; no tensor of the tower is left over."""
    hf, stored = read_hf(name), list(SafetensorsFile(folder(name) / "model.safetensors").entries)
    moved = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    moved |= {part: f"model.{part}" for part in ("audio_tower.", "multi_modal_projector.")}
    modules = list(stored)
    if stored[0].startswith("audio_tower."):
        modules = [
            next((new + each.removeprefix(old) for old, new in moved.items() if each.startswith(old)), each)
            for each in stored
        ]
    family = get_family(hf["architectures"][0])
    for names in (stored, modules):
        specs = ModelSpecs(family.read_config(hf, names), "float32", tensor_names=names)
        sources = {source for spec in specs.all_param_specs(names).values() for source in spec.sources}
        assert sources <= set(names)
        left = set(names) - sources
        assert [each for each in left if not any(fnmatch(each, pattern) for pattern in specs.ignored_tensors)] == []
        assert not any("audio_tower" in each for each in left)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_is_not_to_hear_has_no_tower(name: str) -> None:
    hf = read_hf(name)
    assert get_family(hf["architectures"][0]).read_config(hf, sees=False).encoder is None


@pytest.mark.parametrize(
    ("grids", "samples"),
    [([(1, 1, 20)], 20 * 320), ([(1, 1, 101)], 32_000), ([(1, 2, 50)], 32_000), ([(1, 1, 100)] * 2, 32_000)],
)
def test_clips_without_the_frames_that_rows_depend_on_are_refused(grids: Any, samples: int) -> None:
    settings = settings_of(read_hf("qwen2_audio"))
    with pytest.raises(ValueError, match="clip"):
        count_final_rows(settings, [Grid(*grid) for grid in grids], (1, samples))


def test_the_frame_after_a_sound_is_read_and_not_heard() -> None:
    """It is padding for attention, which no other frame attends to."""
    settings = settings_of(read_hf("qwen2_audio"))
    frames_nc = np.random.default_rng().standard_normal((21, settings.patch_dim)).astype(np.float32)
    batch = make_batch(settings, [Grid(1, 1, 21)], frames_nc, 64, size=(1, 20 * 320))
    assert (batch.num_slots, batch.num_rows) == (21, 10)
    assert np.asarray(batch.ends_ap)[0].tolist() == [20] * 20 + [0] * 44
    assert np.asarray(batch.rows_rg)[:10].ravel().tolist() == list(range(20))
    assert empty_batch(settings, 64).places_pk.shape == (64, 1)

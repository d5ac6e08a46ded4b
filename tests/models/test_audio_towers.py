"""What wrappers' config.json files say about their audio towers, the rows of sounds, and the names of tensors."""

from __future__ import annotations

import copy
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.loading.folder import read_config, read_feature_extractor
from jaxllm.loading.safetensors import SafetensorsFile
from jaxllm.media.audio.processor import make_audio_processor
from jaxllm.media.rules import find_rule
from jaxllm.models import LayerLoop, ModelSpecs, get_family
from jaxllm.models.towers.layout import count_final_rows, empty_batch, make_batch
from jaxllm.models.towers.settings import Grid, TowerSettings
from jaxllm.models.towers.tower import Tower
from tests.e2e.sound_goldens import FAMILIES, folder, rows_of, sound
from tests.models.running import load

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
QWEN3_ASR = {
    "architectures": ["Qwen3ASRForConditionalGeneration"],
    "model_type": "qwen3_asr",
    "audio_config": {"model_type": "qwen3_asr_audio_encoder", "d_model": 1024, "output_dim": 2048, "n_window": None},
    "text_config": {
        "hidden_size": 2048,
        "rope_theta": 1_000_000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
}
ULTRAVOX = {
    "architectures": ["UltravoxModel"],
    "model_type": "ultravox",
    "audio_config": {"model_type": "whisper", "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32},
    "text_config": {"model_type": "llama", "hidden_size": 2048},
    "projector_ln_mid": True,
    "stack_factor": None,
}
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "audio_config": {"model_type": "gemma4_audio", "output_proj_dims": 1536, "num_hidden_layers": 12},
    "vision_config": {"model_type": "gemma4_vision"},
    "text_config": {"model_type": "gemma4_text", "hidden_size": 1536, "hidden_size_per_layer_input": 256},
}
PUBLISHED = {
    "qwen2_audio": (QWEN2_AUDIO, 4096, 256),
    "voxtral": (VOXTRAL, 3072, 256),
    "glm_asr": (GLM_ASR, 2048, 256),
    "qwen3_asr": (QWEN3_ASR, 2048, 1024),
    "ultravox": (ULTRAVOX, 2048, 256),
    "gemma4": (GEMMA4, 1536, 512),
}
"""Each config, and the sizes of a row and of a frame."""
EXTRACTORS = {"gemma4": {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 128}}


def read_hf(family: str) -> dict[str, Any]:
    return json.loads((folder(family) / "config.json").read_text())


def settings_of(hf: dict[str, Any]) -> TowerSettings:
    return tower_of(hf, "bfloat16").settings


def tower_of(hf: dict[str, Any], dtype: str, loop: LayerLoop = LayerLoop.SCAN) -> Tower:
    """Return the tower that hears."""
    family = get_family(hf["architectures"][0])
    config = family.read_config(hf)
    assert hash(config) == hash(family.read_config(hf))
    [part] = [part for part, tower in config.towers.items() if tower.sound is not None]
    return Tower(ModelSpecs(config.encoders[part], dtype, loop, family=family.encoders[part]))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seconds", [0.03, 1.0, 12.3456, 29.999, 30.0])
def test_published_configs_are_read(name: str, seconds: float) -> None:
    """The prompt takes as many rows as the tower gives."""
    hf, width, frame = PUBLISHED[name]
    settings, rule = settings_of(hf), find_rule(hf)
    shape = make_audio_processor(EXTRACTORS.get(name, EXTRACTOR), rule.clips).shape(int(seconds * 16_000))
    rows = count_final_rows(settings, [Grid(*grid) for grid in shape.grids], shape.size)
    assert rows == rule.count_rows(shape)
    assert (settings.output_size, settings.patch_dim) == (width, frame)


LONG = [
    ("voxtral", [1500] * 4, 1500),
    ("glm_asr", [1500] * 4, 1250),
    ("qwen3_asr", [416] * 3 + [52], 1300),  # 80 samples give no column
    ("ultravox", [1500] * 3 + [501], 3 * 188 + 63),
]


@pytest.mark.parametrize(("name", "frames", "num_rows"), LONG)
def test_a_long_sound_has_several_clips(name: str, frames: list[int], num_rows: int) -> None:
    hf, *_ = PUBLISHED[name]
    settings, rule = settings_of(hf), find_rule(hf)
    shape = make_audio_processor(EXTRACTOR, rule.clips).shape(100 * 16_000 + 80)
    assert shape.grids == tuple((1, 1, number) for number in frames)
    rows = count_final_rows(settings, [Grid(*grid) for grid in shape.grids], shape.size)
    assert rows == rule.count_rows(shape) == num_rows


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
    ("qwen3_asr", "audio_config", {"n_window_infer": 150}, "n_window_infer is 150, no multiple of a chunk of 100"),
    ("qwen3_asr", "audio_config", {"num_mel_bins": 60}, "num_mel_bins is 60; expected multiples of 2 and of 8"),
    ("qwen3_asr", "audio_config", {"output_dim": 32}, "rows of 32, but hidden_size of the text model is 64"),
    ("qwen3_asr", "", {"classify_num": 5000}, "classify_num is 5000: an aligner"),
    ("ultravox", "", {"text_model_id": "a/b", "text_config": None}, "text_model_id is 'a/b', another repository"),
    ("ultravox", "", {"audio_model_id": "a/b", "audio_config": None}, "audio_model_id is 'a/b', another repository"),
    ("ultravox", "", {"audio_latency_block_size": 100}, "audio_latency_block_size is 100"),
    ("ultravox", "", {"num_projector_layers": 2}, "num_projector_layers is 2"),
    ("ultravox", "", {"projector_act": "softplus"}, "projector_act is 'softplus'"),
    ("ultravox", "", {"hidden_size": 95}, "hidden_size is 95, which swiglu cannot halve"),
    ("ultravox", "text_config", {"model_type": "gemma3"}, "only llama is supported"),
    ("gemma4", "audio_config", {"attention_context_right": 2}, "attention_context_right is 2"),
    ("gemma4", "audio_config", {"attention_context_left": 12}, "attention_context_left is 12; only 13 is supported"),
    ("gemma4", "audio_config", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("gemma4", "audio_config", {"subsampling_conv_channels": [32]}, "subsampling_conv_channels is"),
    ("gemma4", "text_config", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention is 'vision'"),
    ("gemma4", "audio_config", {"model_type": "gemma3n_audio"}, "only gemma4_audio is supported"),
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
    family = get_family(hf["architectures"][0])
    assert not any(tower.sound for tower in family.read_config(hf, hears=False).towers.values())
    assert len(family.read_config(hf, sees=False).towers) == 1


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


def test_frames_attend_to_their_window_alone() -> None:
    settings = settings_of(read_hf("qwen3_asr"))
    frames_nc = np.random.default_rng().standard_normal((30, settings.patch_dim)).astype(np.float32)
    batch = make_batch(settings, [Grid(1, 1, 30)], frames_nc, 64, size=(1, 2 * 16_000 + 30 * 160))
    assert np.asarray(batch.starts_ap)[0].tolist() == [0] * 13 + [13] * 13 + [26] * 4 + [0] * 34
    assert np.asarray(batch.ends_ap)[0].tolist() == [13] * 13 + [26] * 13 + [30] * 4 + [0] * 34


def test_zeros_fill_up_the_last_row() -> None:
    settings = settings_of(read_hf("ultravox"))
    frames_nc = np.random.default_rng().standard_normal((31, settings.patch_dim)).astype(np.float32)
    batch = make_batch(settings, [Grid(1, 1, 31)], frames_nc, 128, size=(1, 31 * 320 - 100))
    assert (batch.num_slots, batch.num_rows) == (31, 11)
    assert np.asarray(batch.rows_rg)[:11].ravel().tolist() == [*range(31), 128, 128]


def test_qwen3_asr_is_read_in_the_form_of_its_own_repositories(tmp_path: Path) -> None:
    """Its config has a thinker's, and its tensors have other names; the weights are those of HF's form."""
    hf, file = read_hf("qwen3_asr"), SafetensorsFile(folder("qwen3_asr") / "model.safetensors")
    hf["audio_config"]["model_type"], hf["text_config"]["model_type"] = "qwen3_asr_audio_encoder", "qwen3_asr_text"
    inner = {part: hf.pop(part) for part in ("audio_config", "text_config")} | {"model_type": "qwen3_asr_thinker"}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"thinker_config": inner}))
    read = read_config(tmp_path, "here")
    moved = {"model.language_model.": "thinker.model.", "lm_head.": "thinker.lm_head."}
    moved |= {"model.audio_tower.": "thinker.audio_tower."}
    moved |= {
        f"model.multi_modal_projector.linear_{number}.": f"thinker.audio_tower.proj{number}." for number in (1, 2)
    }
    family = get_family(read["architectures"][0])
    sources = []
    for changes in ({}, moved):
        names = [next((name.replace(*one) for one in changes.items() if one[0] in name), name) for name in file.entries]
        specs = ModelSpecs(family.read_config(read, names), "float32", tensor_names=names)
        back = dict(zip(names, file.entries, strict=True))
        params = specs.all_param_specs(names)
        sources.append({path: [back[source] for source in spec.sources] for path, spec in params.items()})
    assert sources[0] == sources[1]
    assert sorted(name for names in sources[0].values() for name in names) == sorted(file.entries)


def test_a_norm_may_end_the_projector_of_ultravox() -> None:
    """It does before 0.5; later it is between both matmuls."""
    hf, names = read_hf("ultravox"), list(SafetensorsFile(folder("ultravox") / "model.safetensors").entries)
    hf["projector_ln_mid"] = False
    names = [name.replace(".ln_mid.", ".ln_post.") for name in names]
    specs = ModelSpecs(get_family("UltravoxModel").read_config(hf, names), "float32", tensor_names=names)
    sources = [source for spec in specs.all_param_specs(names).values() for source in spec.sources]
    assert sorted(sources) == sorted(names)


@pytest.mark.parametrize("loop", [LayerLoop.SCAN, LayerLoop.SWITCH])
def test_a_conformer_s_rows_are_hf_s_in_any_loop_and_bucket(loop: LayerLoop) -> None:
    """Frames of padding, which are NaN here, and columns after the sound are heard by no row."""
    hf, name = read_hf("gemma4"), "gemma4"
    tower = tower_of(hf, "float32", loop)
    file = SafetensorsFile(folder(name) / "model.safetensors")
    params = load(tower, {each: file.read(each) for each in file.entries if "audio" in each})
    processor = make_audio_processor(read_feature_extractor(folder(name), name), find_rule(hf).clips)
    for number in range(3):
        item = processor.process(sound(name, number))
        patches, grids = item.patches, [Grid(*grid) for grid in item.grids]
        batch = make_batch(tower.settings, grids, patches, len(patches) + 7 * number, size=item.size)
        batch.patches_pc[int(batch.num_slots) :] = np.nan
        rows = np.asarray(jax.jit(tower.encode)(params, batch))[: int(batch.num_rows)]
        np.testing.assert_allclose(rows, rows_of(name, number), rtol=0, atol=1e-4)

"""What engines of models that hear settle: the placeholder, the rows of the longest sound, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.media_settings import MediaSize, media_settings, media_size
from tests.config.test_media_size import resolve
from tests.e2e.sound_goldens import FAMILIES, WITH_PICTURE, folder

# A clip of the tiny checkpoints has 2 s.
ROWS = {"qwen2_audio": 64, "voxtral": 512, "glm_asr": 512, "qwen3_asr": 512, "ultravox": 512, "gemma4": 512}
"""The rows of the feature cache in steps of 64 tokens and a context of 512: at most those of the longest sound."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_feature_cache_holds_the_longest_sound(family: str):
    size = media_size(resolve(folder(family), limit_mm_per_prompt={"image": 0, "video": 0}))
    assert size == MediaSize(ROWS[family], 0)
    settings = media_settings(resolve(folder(family), limit_mm_per_prompt={"audio": 2}))
    assert settings is not None
    others = 999 if family in WITH_PICTURE else 0
    assert (settings.limit("image"), settings.limit("video"), settings.limit("audio")) == (others, others, 2)
    assert settings.takes_images is (family in WITH_PICTURE)


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        ({}, ["encoder", "audio"]),
        ({"audio": 0}, ["encoder"]),
        ({"image": 0, "video": 0}, ["audio"]),
        ({"image": 0, "video": 0, "audio": 0}, []),
    ],
)
def test_each_tower_is_loaded_if_its_items_may_come(limits: dict[str, int], parts: list[str]):
    config = resolve(folder("gemma4"), limit_mm_per_prompt=limits)
    assert list(config.model_config.towers) == parts
    settings = media_settings(config)
    modalities = [] if settings is None else [each for each in ("image", "audio") if settings.limit(each)]
    assert modalities == [{"encoder": "image", "audio": "audio"}[part] for part in parts]


def test_a_model_without_a_feature_extractor_may_see(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shutil.copytree(folder("gemma4"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "processor_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert list(resolve(tmp_path).model_config.towers) == ["encoder"]
    assert "has no preprocessor_config.json with settings of sounds: it hears nothing" in caplog.text


@pytest.mark.parametrize("fields", [{"limit_mm_per_prompt": {"audio": 0}}, {"language_model_only": True}])
def test_no_tower_is_loaded_where_no_sound_may_come(fields: dict[str, Any]):
    config = resolve(folder("voxtral"), **fields)
    assert config.model_config.encoder is None
    assert media_settings(config) is None
    images: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    assert resolve(folder("voxtral"), **images).model_config.encoder is not None


def test_a_checkpoint_without_a_feature_extractor_reads_text(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shutil.copytree(folder("qwen2_audio"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert resolve(tmp_path).model_config.encoder is None
    assert "has no preprocessor_config.json: it reads text alone" in caplog.text


def test_the_feature_extractor_may_be_in_the_processor_s_file(tmp_path: Path):
    shutil.copytree(folder("glm_asr"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    settings = {"processor_class": "GlmAsrProcessor", "feature_extractor": json.loads(file.read_text())}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    file.unlink()
    assert media_size(resolve(tmp_path)) == MediaSize(ROWS["glm_asr"], 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_processor_kwargs", {"max_pixels": 9}),
        ("media_io_kwargs", {"video": {"num_frames": 3}}),
        ("enable_mm_embeds", True),
    ],
)
def test_options_of_images_are_refused(name: str, value: Any):
    with pytest.raises(VLLMValidationError, match=f"{name} is for a model that sees") as caught:
        media_settings(resolve(folder("voxtral"), **{name: value}))
    assert caught.value.parameter == name


def test_other_feature_extractors_are_refused(tmp_path: Path):
    shutil.copytree(folder("voxtral"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sampling_rate": 24_000}))
    with pytest.raises(VLLMValidationError, match="with sampling_rate 24000, and only Whisper's and"):
        media_size(resolve(tmp_path))

"""The feature cache and the programs of towers are as large as the options of images and videos make necessary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm.check.media import report_media
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.video_processor import MAX_VIDEO_PIXELS
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.media_settings import MediaSize, media_settings, media_size, most_frames
from tests.e2e.media_goldens import folder


def resolve(model: Path | str, **fields: Any) -> EngineConfig:
    fields = {"max_num_batched_tokens": 64} | fields
    return EngineArgs(model=str(model), load_format="dummy", **fields).create_engine_config()


def long(family: str, tmp_path: Path) -> Path:
    """Return a family's checkpoint with a context that holds every video."""
    shutil.copytree(folder(family), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["max_position_embeddings"] = 2**17
    file.write_text(json.dumps(config))
    return tmp_path


def size_of(model: Path | str, options: dict[str, Any] | None = None, **video: Any) -> MediaSize:
    return media_size(resolve(model, mm_processor_kwargs=options or {}, media_io_kwargs={"video": video}))


@pytest.mark.parametrize(
    ("sampling", "pixels", "num_frames"),
    [
        ({}, 448**2, 32),
        ({"fps": 1}, 0, 768),
        ({"fps": 1}, 448**2, 334),
        ({"fps": 1}, 512**2, 256),
        ({"fps": 1, "max_frames": 9}, 512**2, 9),
        ({"num_frames": 64, "max_frames": 16}, 448**2, 16),
        ({"num_frames": 64}, MAX_VIDEO_PIXELS // 26, 26),
    ],
)
def test_frames_are_bounded_by_sampling_and_by_pixels(sampling: dict[str, Any], pixels: int, num_frames: int):
    assert most_frames(sampling, pixels) == num_frames


def test_a_row_ends_the_videos_of_llava_onevision_alone(tmp_path: Path):
    assert size_of(long("smolvlm", tmp_path)) == MediaSize(32 * 4, 32)
    assert size_of(long("llava_onevision", tmp_path)) == MediaSize(32 * 4 + 1, 32)


def test_both_places_of_sampling_size_the_cache(tmp_path: Path):
    model = long("smolvlm", tmp_path)
    assert size_of(model, num_frames=64) == size_of(model, {"num_frames": 64}) == MediaSize(64 * 4, 64)
    settings = media_settings(resolve(model, mm_processor_kwargs={"num_frames": 64, "do_image_splitting": False}))
    assert settings is not None
    assert (settings.options, settings.sampling) == ({"do_image_splitting": False}, {"num_frames": 64})


def test_frames_that_nobody_asked_for_count_up_to_a_bound(tmp_path: Path):
    model = long("gemma4", tmp_path)
    assert size_of(model) == MediaSize(32 * 70, 32)
    assert size_of(model, {"max_soft_tokens": 1120}) == MediaSize(7 * 1120, 7)
    assert size_of(model, {"max_soft_tokens": 1120}, fps=1) == MediaSize(7 * 1120, 7)
    assert size_of(model, {"max_soft_tokens": 1120}, num_frames=8) == MediaSize(8 * 1120, 8)
    wide = resolve(model, mm_processor_kwargs={"max_soft_tokens": 1120}, max_num_batched_tokens=10_000)
    assert media_size(wide) == MediaSize(10_000, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 512}, "size must name its sides"),
        ({"size": {"longest_edge": "x"}}, "longest_edge"),
        ({"max_pixelz": 1}, "max_pixelz"),
        ({"max_pixels": -1}, "max_pixels must be positive"),
    ],
)
def test_wrong_options_are_refused_before_they_size_anything(options: dict[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message) as caught:
        size_of(folder("qwen2_vl"), options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_a_check_takes_options_of_frames_among_the_processor_s():
    config = resolve(folder("smolvlm"), mm_processor_kwargs={"num_frames": 64})
    [settings] = config.model_config.towers.values()
    model = SimpleNamespace(towers={"encoder": SimpleNamespace(settings=settings)}, dtype=np.dtype("float32"))
    sized: Any = SimpleNamespace(config=config, model=model, tower_specs={})
    report = report_media(sized)
    assert report is not None
    assert (report.cache_rows, len(report.pictures)) == (64 * 4, 2)

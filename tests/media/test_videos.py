"""Videos become the patches that transformers' processors with torch make, or are refused before they are resized."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.folder import read_processor
from jaxllm.media.video_processor import FrameTimes, VideoProcessor
from tests.media.support import clip, every_third, golden

FAMILIES = golden("families.json")
QWEN3 = FAMILIES["qwen3_vl"][1]


@pytest.mark.parametrize("name", sorted(golden("videos.npz")))
def test_patches_are_those_of_torchs_processors(name: str):
    family, *sizes = name.split("-")
    num_frames, height, width = map(int, sizes)
    [settings, *_] = [case["settings"] for case in golden("prompts.json") if case["config"] == FAMILIES[family][1]]
    processor = VideoProcessor(settings, FAMILIES[family][1])
    video = processor.process(clip(num_frames, height, width), every_third(num_frames))
    assert video.patches.shape[0] == video.shape.num_patches
    rng = np.random.default_rng(num_frames)
    values = golden("videos.npz")[name]
    rows, columns = (rng.integers(0, most, values.size) for most in video.patches.shape)
    np.testing.assert_allclose(video.patches[rows, columns], values, rtol=0, atol=1e-6)


def test_each_step_has_its_second():
    qwen2 = VideoProcessor({}, FAMILIES["qwen2_vl"][1]).shape((64, 96), every_third(5))
    assert qwen2.timestamps == (0.0, 0.5, 1.0)
    assert qwen2.seconds_per_step == 0.5
    qwen3 = VideoProcessor({}, QWEN3).shape((64, 96), every_third(5))
    assert qwen3.timestamps == (0.125, 0.625, 1.0)


def test_options_and_limits():
    videos = VideoProcessor({}, QWEN3)
    fewer = videos.shape((640, 960), every_third(4), {"max_pixels": 40_000})
    assert fewer.num_patches < videos.shape((640, 960), every_third(4)).num_patches
    with pytest.raises(VLLMValidationError, match="num_frames"):
        videos.shape((64, 96), every_third(4), {"num_frames": -1})
    with pytest.raises(VLLMValidationError, match="more than 1000: send fewer"):
        VideoProcessor({}, QWEN3, max_pixels=1000).shape((64, 96), every_third(4))
    with pytest.raises(VLLMValidationError, match="1 frames of 96 x 64 pixels"):
        videos.shape((64, 96), every_third(1))


@pytest.mark.parametrize(
    ("family", "options", "num_patches"),
    [
        ("gemma4", {}, 70 * 9),  # per frame, of a size that has the aspect ratio of a budget
        ("gemma4", {"max_soft_tokens": 140}, 126 * 9),
        ("gemma4_unified", {"max_soft_tokens": 140}, 126),
        ("internvl", {"max_patches": 3, "crop_to_patches": True}, 27 * 27),
        ("smolvlm", {"do_image_splitting": True, "size": {"longest_edge": 200}}, 26 * 26),
        ("llava_onevision", {}, 27 * 27),
    ],
)
def test_frames_are_not_split(family: str, options: dict[str, Any], num_patches: int):
    shape = VideoProcessor({}, FAMILIES[family][1]).shape((84, 120), every_third(3), options)
    assert shape.grids[0][0] == 3
    assert shape.num_patches == 3 * num_patches
    assert shape.timestamps == (0.0, 0.25, 0.5)


def test_the_length_of_a_video_is_known_or_that_of_its_frames():
    videos = VideoProcessor({}, FAMILIES["smolvlm"][1])
    assert videos.shape((64, 96), every_third(5)).duration == 1.0
    assert videos.shape((64, 96), replace(every_third(5), duration=1.25)).duration == 1.25


def test_smolvlms_checkpoints_have_the_size_of_frames_apart():
    sampled = {"video_sampling": {"video_size": {"longest_edge": 112}}, "max_image_size": {"longest_edge": 56}}
    size = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    frames, config = clip(2, 70, 90), FAMILIES["smolvlm"][1]
    videos = [VideoProcessor(settings, config).process(frames, every_third(2)) for settings in (sampled, size)]
    assert videos[0].data == videos[1].data


def test_wrong_frames_are_refused():
    videos = VideoProcessor({}, QWEN3)
    for frames in (np.zeros((4, 64, 96), np.uint8), np.zeros((4, 64, 96, 3), np.float32), clip(3, 64, 96)):
        with pytest.raises(VLLMValidationError, match="a video is 4 frames"):
            videos.process(frames, every_third(4))


def test_models_without_videos_are_refused():
    with pytest.raises(VLLMValidationError, match="'gemma3' take no videos"):
        VideoProcessor({}, {"model_type": "gemma3"})


def test_a_folder_has_settings_for_videos(tmp_path: Path):
    kind = {"video_processor_type": "Qwen3VLVideoProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, **kind}))
    by_images = VideoProcessor(read_processor(tmp_path, "model", "video"), QWEN3).shape((64, 96), every_third(4))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"patch_size": 16, **kind}))
    by_videos = VideoProcessor(read_processor(tmp_path, "model", "video"), QWEN3).shape((64, 96), every_third(4))
    assert by_videos != by_images
    assert by_videos == VideoProcessor({"patch_size": 16}, QWEN3).shape((64, 96), every_third(4))


def test_taken_per_second():
    assert FrameTimes(30.0, (0, 15, 30, 45), 60).taken_per_second == 2.0

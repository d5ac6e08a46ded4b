"""Images become the patches that transformers' processors with torch make, or are refused before they are resized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm.exceptions import UnknownParameterError, VLLMValidationError
from jaxllm.loading.folder import read_processor
from jaxllm.media.decode import decode_image
from jaxllm.media.processors import ImageProcessor
from tests.media.support import golden, picture

FAMILIES = golden("families.json")
REFUSES = {"glm4v", "glm46v", "pixtral", "qwen2_vl", "qwen3_vl"}
"""Families that refuse images 300 times as long as wide."""
KINDS = [name.removeprefix("file-") for name in golden("files.npz") if name.startswith("file-")]
QWEN = {"image_processor_type": "Qwen2VLImageProcessorFast"}
GEMMA3 = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}
INTERNVL = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}}
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}}
MEANS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SMOLVLM = {"image_processor_type": "SmolVLMImageProcessor"}


def processor(settings: dict[str, Any], **config: Any) -> ImageProcessor:
    return ImageProcessor(settings, {"vision_config": {"patch_size": 14}, **config})


def compare(patches: np.ndarray, expected: np.ndarray, seed: int) -> None:
    """Compare patches with a golden's values, which are of places that the seed names."""
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(0, most, expected.size) for most in patches.shape)
    np.testing.assert_array_equal(patches[rows, columns], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_of_torchs_processors(family: str):
    settings, config, options = FAMILIES[family]
    images = ImageProcessor(settings, config)
    arrays = golden("processors.npz")
    for name in [name for name in arrays if name.startswith(f"{family}-") and not name.endswith("shape")]:
        height, width = map(int, name.split("-")[1:])
        image = images.process(picture(height, width), options)
        assert image.patches.shape == tuple(arrays[f"{name}-shape"])
        assert image.patches.dtype == np.float32
        assert image.patches.flags.c_contiguous
        compare(image.patches, arrays[name], height)
        assert image.shape == images.shape((height, width), options)
        assert image.shape.num_patches == len(image.patches)
        assert image.size == (height, width)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_all_kinds_become_the_patches_of_torchs_processors(family: str):
    settings, config, options = FAMILIES[family]
    images = ImageProcessor(settings, config)
    arrays = golden("files.npz")
    for kind in KINDS:
        data = arrays[f"file-{kind}"].tobytes()
        compare(images.process(decode_image(data), options).patches, arrays[f"{family}-{kind}"], len(data))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 300), (300, 1), (150, 2)])
def test_slender_images_are_taken_or_refused(family: str, size: tuple[int, int]):
    settings, config, options = FAMILIES[family]
    images = ImageProcessor(settings, config)
    if family in REFUSES and max(size) == 300:
        with pytest.raises(VLLMValidationError, match=f"{size[1]} x {size[0]} pixels"):
            images.process(picture(*size), options)
    else:
        image = images.process(picture(*size), options)
        assert len(image.patches) == image.shape.num_patches > 0


def test_patches_lie_in_raster_order_but_for_qwens_squares():
    rows, columns = np.mgrid[0:4, 0:6]
    numbers = np.repeat(np.repeat(rows * 6 + columns, 14, 0), 14, 1).astype(np.uint8)
    image = Image.fromarray(np.stack([numbers] * 3, -1))
    raw = {"do_normalize": False, "do_rescale": False}
    pixtral = processor({"image_processor_type": "PixtralImageProcessor", **raw}, spatial_merge_size=2).process(image)
    assert pixtral.grids == ((1, 4, 6),)
    assert pixtral.patches[:, 0].tolist() == list(range(24))
    qwen = processor({**QWEN, **raw}).process(image)
    assert qwen.grids == ((1, 4, 6),)
    assert qwen.patches[:8, 0].tolist() == [0, 1, 6, 7, 2, 3, 8, 9]


def test_tiles_and_their_layout():
    idefics, config, _ = FAMILIES["idefics3"]
    assert ImageProcessor(idefics, config).shape((100, 150)).layout == (2, 3)
    assert len(ImageProcessor(idefics, config).shape((100, 150)).grids) == 7
    assert processor(INTERNVL, model_type="internvl").shape((100, 150)).layout == (2, 3)
    assert processor(INTERNVL).shape((100, 150)).layout == (0, 0)  # InternVL's processor is what asks for tiles
    assert processor(GEMMA3).shape((100, 150)).grids == ((1, 4, 4),)
    crops = {"do_pan_and_scan": True}
    assert processor(GEMMA3, model_type="gemma3").shape((300, 1200), crops).layout == (1, 4)
    assert processor(GEMMA3, model_type="gemma3").shape((1200, 300), crops).layout == (4, 1)


def test_one_of_several_images_is_a_single_tile():
    settings, config, _ = FAMILIES["llava_onevision"]
    images = ImageProcessor(settings, config)
    beside = images.process(picture(100, 150), is_beside_others=True)
    assert len(images.shape((100, 150)).grids) == 7
    assert beside.shape == images.shape((100, 150), is_beside_others=True)
    assert beside.grids == ((1, 4, 4),)
    square = Image.new("RGB", (150, 150), (122, 116, 104))
    square.paste(picture(100, 150), (0, 25))
    expected = processor({**CLIP, "image_processor_type": "SiglipImageProcessor", "size": settings["size"]} | MEANS)
    np.testing.assert_allclose(beside.patches, expected.process(square).patches, rtol=0, atol=1e-6)
    assert processor(CLIP).shape((100, 150), is_beside_others=True) == processor(CLIP).shape((100, 150))
    with pytest.raises(VLLMValidationError, match="more than 33554432"):
        images.shape((1, 10_000), is_beside_others=True)


@pytest.mark.parametrize("kind", ["Idefics3", "SmolVLM"])
@pytest.mark.parametrize("options", [{"do_image_splitting": False}, {"size": {"longest_edge": 32}}])
def test_an_image_that_is_not_split_is_one_tile(kind: str, options: dict[str, Any]):
    settings = {"image_processor_type": f"{kind}ImageProcessor", "max_image_size": {"longest_edge": 32}}
    images = processor(settings | {"size": {"longest_edge": 64}}, vision_config={"patch_size": 8})
    image = images.process(picture(30, 47), options)
    assert (image.grids, image.shape.layout) == (((1, 4, 4),), (0, 0))
    assert image.patches.shape == (16, 3 * 8 * 8)


def test_options_change_the_number_of_patches():
    images = processor(QWEN)
    fewer = images.shape((500, 700), {"max_pixels": 28 * 28 * 16})
    assert fewer.num_patches <= 64 < images.shape((500, 700)).num_patches
    assert images.shape((500, 700), {"size": {"longest_edge": 28 * 28 * 16}}) == fewer
    assert images.process(picture(500, 700), {"max_pixels": 28 * 28 * 16}).shape == fewer
    assert images.shape((28, 28), {"min_pixels": 56 * 56 * 4}).num_patches >= 64


def test_what_the_checkpoint_says_too_is_no_option():
    images = processor(QWEN)
    same = {"patch_size": images.hf.patch_size, "image_mean": list(images.hf.image_mean), "do_resize": True}
    assert images.check(same) == images.check({})


@pytest.mark.parametrize(
    ("settings", "options", "named"),
    [
        (QWEN, {"num_crops": 4}, "num_crops"),
        (QWEN, {"patch_size": 16}, "patch_size .* is fixed by the checkpoint"),
        (QWEN, {"image_mean": [0.0]}, "image_mean .* is fixed by the checkpoint"),
        (QWEN, {"size": 3}, "size"),
        ({"image_processor_type": "Gemma4ImageProcessor"}, {"max_soft_tokens": 71}, "max_soft_tokens"),
        (GEMMA3, {"size": {"height": 99, "width": 99}}, "size"),
        (CLIP, {"crop_size": {"height": 99, "width": 99}}, "crop_size"),
        (CLIP, {"do_resize": False}, "do_resize"),
        (QWEN, {"size": {"height": 99, "width": 99}}, "size"),
        (QWEN, {"max_pixels": "many"}, "max_pixels"),
        (QWEN, {"max_pixels": -1}, "max_pixels"),
        (QWEN, {"max_pixels": 2**31}, "max_pixels must be positive and below"),
        (QWEN, {"min_pixels": 10**400}, "min_pixels must be positive and below"),
        (QWEN, {"size": {"shortest_edge": 10**400, "longest_edge": 10**401}}, "size must be positive and below"),
        (QWEN, {"min_pixels": 90_000, "max_pixels": 80_000}, "min_pixels is 90000, more than max_pixels, 80000"),
        (QWEN, {"min_pixels": 2**30}, "min_pixels is 1073741824, more than max_pixels"),
        (INTERNVL, {"min_patches": 9, "max_patches": 4}, "min_patches is 9, more than max_patches, 4"),
        (GEMMA3, {"pan_and_scan_min_ratio_to_activate": float("inf")}, "must be positive and below"),
        (GEMMA3, {"pan_and_scan_max_num_crops": 0}, "pan_and_scan_max_num_crops"),
        (SMOLVLM, {"max_image_size": {"longest_edge": 1}}, "max_image_size"),
    ],
)
def test_other_options_are_refused_by_name(settings: dict[str, Any], options: dict[str, Any], named: str):
    with pytest.raises(VLLMValidationError, match=named):
        processor(settings).shape((50, 70), options)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownParameterError, match="Did you mean 'max_pixels'"):
        processor(QWEN).shape((50, 70), {"max_pixel": 3})


@pytest.mark.parametrize(
    ("settings", "size", "options"),
    [
        (QWEN, (4000, 4000), {"max_pixels": 2**30, "min_pixels": 2**30}),
        (INTERNVL, (50, 70), {"crop_to_patches": True, "max_patches": 10**9}),
        (GEMMA3, (1, 10**6), {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 10**9}),
        (CLIP, (1, 10_000), {}),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True}, (1, 10_000), {}),
    ],
)
def test_a_size_over_the_limit_is_refused_before_pixels_are_made(
    settings: dict[str, Any], size: tuple[int, int], options: dict[str, Any]
):
    with pytest.raises(VLLMValidationError, match="more than 33554432"):
        processor(settings, model_type="gemma3").shape(size, options)


def test_a_large_image_that_shrinks_is_taken():
    assert processor(CLIP).shape((9000, 12_000)).num_patches == 256
    assert processor(QWEN).shape((9000, 12_000)).num_patches <= 1280 * 4


def test_an_image_that_a_processor_cannot_take_is_refused_by_its_size():
    with pytest.raises(VLLMValidationError, match="1000 x 1 pixels"):
        processor(QWEN).process(picture(1, 1000))


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_checkpoints_folder_names_its_processor(tmp_path: Path, name: str):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    settings = QWEN if name == "preprocessor_config.json" else {"image_processor": QWEN}
    (tmp_path / name).write_text(json.dumps(settings))
    images = ImageProcessor(read_processor(tmp_path, "model", "image"), {"vision_config": {"patch_size": 14}})
    assert images.shape((56, 84)).grids == ((1, 4, 6),)


def test_unsupported_checkpoints_are_refused(tmp_path: Path):
    with pytest.raises(VLLMValidationError, match="image_processor_type '' is not supported"):
        ImageProcessor(read_processor(tmp_path, "model", "image"), {})
    with pytest.raises(VLLMValidationError, match="Kimi"):
        processor({"image_processor_type": "KimiK25ImageProcessorFast"})
    with pytest.raises(VLLMValidationError, match="resample is 4; images are resized with 1, 2, 3"):
        processor({**CLIP, "resample": 4})

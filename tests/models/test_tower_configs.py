"""What wrappers' config.json files say about their vision towers, and the rows that their images take."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.media.processors import cut_patches
from jaxllm.models import ModelSpecs, get_family
from jaxllm.models.towers.layout import count_final_rows, count_rows, count_slots, make_batch
from jaxllm.models.towers.settings import Grid, Projector, Tiling, TowerSettings
from jaxllm.models.towers.tiling import NEWLINE, arrange, arrange_frames, arrange_whole
from jaxllm.models.towers.tower import Tower
from jaxllm.resolve.media_settings import most_frame_rows
from tests.models.test_towers import read_case
from tests.models.tiny import read_hf_config

pytestmark = pytest.mark.models

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "num_key_value_heads": 2,
}


def published(architecture: str, vision: dict[str, Any], text: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return a config.json with the vision part of a model that is published, and its text part's width."""
    return {"architectures": [architecture], "vision_config": vision, "text_config": TEXT | text, **keys}


QWEN2_VISION: dict[str, Any] = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "in_chans": 3, "num_heads": 16}
PUBLISHED = {
    "Qwen2-VL-2B": (
        # Its text part's keys are among the wrapper's.
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "hidden_size": 1536,
            **TEXT,
            "vision_config": QWEN2_VISION,
        },
        Grid(1, 36, 52),
        (1280, 32, 5120, 468),
    ),
    "Qwen2.5-VL-3B": (
        published(
            "Qwen2_5_VLForConditionalGeneration",
            {"hidden_size": 1280, "out_hidden_size": 2048, "in_chans": 3, "spatial_patch_size": 14},
            {"hidden_size": 2048},
        ),
        Grid(1, 36, 52),
        (1280, 32, 3420, 468),
    ),
    "Qwen3-VL-2B": (
        published(
            "Qwen3VLForConditionalGeneration",
            {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
            | {"deepstack_visual_indexes": [5, 11, 17]},
            {"hidden_size": 2048},
        ),
        Grid(2, 14, 22),
        (1024, 24, 4096, 154),
    ),
    "Gemma 3 4B": (
        published(
            "Gemma3ForConditionalGeneration",
            {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model"}
            | {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
            {"hidden_size": 2560, "model_type": "gemma3_text"},
            mm_tokens_per_image=256,
        ),
        Grid(1, 64, 64),
        (1152, 27, 4304, 256),
    ),
    "LLaVA 1.5 7B": (
        published(
            "LlavaForConditionalGeneration",
            {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"}
            | {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
            {"model_type": "llama", "hidden_size": 4096, "rms_norm_eps": 1e-5},
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
        ),
        Grid(1, 24, 24),
        (1024, 23, 4096, 576),
    ),
    "Gemma 4 E2B": (
        published(
            "Gemma4ForConditionalGeneration",
            {"hidden_size": 768, "model_type": "gemma4_vision", "num_hidden_layers": 16, "use_clipped_linears": True}
            | {"head_dim": 64, "num_attention_heads": 12, "num_key_value_heads": 12, "pooling_kernel_size": 3},
            {"hidden_size": 1536, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0},
        ),
        Grid(1, 48, 51),
        (768, 16, 3072, 272),
    ),
    "GLM-4.1V 9B": (
        # Its text part's keys are among the wrapper's.
        {
            "architectures": ["Glm4vForConditionalGeneration"],
            **TEXT,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
            "vision_config": {"depth": 24, "hidden_size": 1536, "out_hidden_size": 4096, "intermediate_size": 13_696},
        },
        Grid(1, 24, 32),
        (1536, 24, 4096, 192),
    ),
    "LLaVA-OneVision 0.5B": (
        published(
            "LlavaOnevisionForConditionalGeneration",
            {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model"}
            | {"num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False},
            {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14},
            image_grid_pinpoints=[[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
            vision_aspect_ratio="anyres_max_9",
        ),
        Grid(1, 27, 27),
        (1152, 26, 4304, 729),
    ),
    "Mistral Small 3.1": (
        published(
            "Mistral3ForConditionalGeneration",
            {"hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096, "model_type": "pixtral"}
            | {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0},
            {"hidden_size": 5120, "model_type": "mistral"},
            spatial_merge_size=2,
            vision_feature_layer=-1,
        ),
        Grid(1, 40, 66),
        (1024, 24, 4096, 660),
    ),
    "InternVL3 1B": (
        published(
            "InternVLForConditionalGeneration",
            {"hidden_size": 1024, "image_size": [448, 448], "patch_size": [14, 14], "model_type": "internvl_vision"},
            {"hidden_size": 896, "model_type": "qwen2"},
            downsample_ratio=0.5,
        ),
        Grid(1, 32, 32),
        (1024, 24, 4096, 256),
    ),
    "InternVL3 38B": (
        published(
            "InternVLForConditionalGeneration",
            {"hidden_size": 3200, "image_size": [448, 448], "patch_size": [14, 14], "model_type": "internvl_vision"}
            | {"intermediate_size": 12_800, "num_attention_heads": 25, "num_hidden_layers": 45}
            | {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
            {"hidden_size": 5120, "model_type": "qwen2"},
            downsample_ratio=0.5,
        ),
        Grid(1, 32, 32),
        (3200, 45, 12_800, 256),
    ),
    "Llama 4 Scout": (
        published(
            "Llama4ForConditionalGeneration",
            {"hidden_size": 1408, "image_size": 336, "intermediate_size": 5632, "model_type": "llama4_vision_model"}
            | {"num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "rope_theta": 10000}
            | dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 4096),
            {"hidden_size": 5120, "model_type": "llama4_text", "head_dim": 128},
        ),
        Grid(1, 24, 24),
        (1408, 34, 5632, 144),
    ),
    "SmolVLM 256M": (
        published(
            "Idefics3ForConditionalGeneration",
            {"hidden_size": 768, "image_size": 512, "model_type": "idefics3", "num_attention_heads": 12}
            | {"patch_size": 16, "use_base_siglip": False},
            {"hidden_size": 576, "model_type": "llama"},
            scale_factor=4,
        ),
        Grid(1, 32, 32),
        (768, 12, 3072, 64),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    hf, grid, (width, num_layers, inner, num_rows) = PUBLISHED[name]
    family = get_family(hf["architectures"][0])
    vision = family.read_config(hf).encoder
    assert vision is not None
    assert (vision.hidden_size, vision.num_layers, vision.layers[0].intermediate_size) == (width, num_layers, inner)
    tower = Tower(ModelSpecs(vision, "bfloat16", family=family.vision))
    assert count_rows(tower.settings, [grid]) == num_rows
    assert hash(vision) == hash(family.read_config(hf).encoder)


def test_gemma4_12b_has_no_layers_in_its_tower() -> None:
    hf = published(
        "Gemma4UnifiedForConditionalGeneration",
        {"model_type": "gemma4_unified_vision"},
        {"model_type": "gemma4_unified_text", "hidden_size": 3840},
    )
    family = get_family("Gemma4UnifiedForConditionalGeneration")
    vision = family.read_config(hf).encoder
    assert vision is not None
    assert (vision.hidden_size, vision.num_layers) == (3840, 0)
    settings = Tower(ModelSpecs(vision, "bfloat16", family=family.vision)).settings
    assert (settings.patch_dim, settings.side, settings.output_size) == (3 * 48 * 48, 1120, 3840)
    assert count_rows(settings, [Grid(1, 16, 17)]) == 272


REFUSED = [
    ("qwen2_vl", "vision_config", {"num_heads": 5}, "num_heads is 5, which does not divide embed_dim, 48"),
    ("qwen2_vl", "vision_config", {"num_heads": 24}, "heads of 2; RoPE in two directions needs a multiple of 4"),
    ("qwen2_vl", "vision_config", {"hidden_size": 40}, "rows of 40, but hidden_size of the text model is 32"),
    ("qwen2_vl", "vision_config", {"hidden_act": "softplus"}, "hidden_act is 'softplus'"),
    ("qwen2_vl", "vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ("qwen2_5_vl", "vision_config", {"window_size": 4}, "window_size is 4, less than the pixels of a row"),
    ("qwen3_vl", "vision_config", {"num_position_embeddings": 24}, "num_position_embeddings is 24, expected a square"),
    ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [2, 0]}, "deepstack_visual_indexes"),
    ("gemma3", "", {"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16, which does not divide 6 x 6 patches"),
    ("gemma3", "vision_config", {"model_type": "clip_vision_model"}, "only siglip_vision_model is supported"),
    ("gemma4", "vision_config", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    ("gemma4", "vision_config", {"head_dim": 18}, "head_dim is 18; RoPE in two directions needs a multiple of 4"),
    ("gemma4", "vision_config", {"attention_bias": True}, "attention_bias is True"),
    ("gemma4_unified", "vision_config", {"output_proj_dims": 40}, "output_proj_dims is 40"),
    ("gemma4_unified", "vision_config", {"model_type": "gemma4_vision"}, "only gemma4_unified_vision is supported"),
    ("gemma4_unified", "text_config", {"model_type": "gemma4_text"}, "only gemma4_unified_text is supported"),
    ("glm4v", "vision_config", {"out_hidden_size": 40}, "rows of 40, but hidden_size of the text model is 32"),
    ("glm4v_moe", "text_config", {"model_type": "glm4v_text"}, "only glm4v_moe_text is supported"),
    ("llava", "", {"vision_feature_layer": [1, 2]}, "vision_feature_layer is \\[1, 2\\]"),
    ("llava", "", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
    ("llava", "vision_config", {"patch_size": 48}, "image_size is 24, less than a patch of 48"),
    ("llava_next", "", {"image_grid_pinpoints": [[24, 50]]}, "image_grid_pinpoints has other sizes than multiples"),
    ("llava_next", "", {"image_grid_pinpoints": "(1x1)"}, "image_grid_pinpoints is '\\(1x1\\)'"),
    ("llava_next", "text_config", {"model_type": "gpt2"}, "model_type is 'gpt2'"),
    ("llava_onevision", "", {"vision_aspect_ratio": "square"}, "vision_aspect_ratio is 'square'"),
    ("llava_onevision", "", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
    ("mistral3", "", {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
    ("internvl", "vision_config", {"norm_type": "batch_norm"}, "norm_type is 'batch_norm'"),
    ("internvl", "vision_config", {"use_mask_token": True}, "use_mask_token is True"),
    ("internvl", "text_config", {"model_type": "gpt2"}, "model_type is 'gpt2'"),
    ("llama4", "vision_config", {"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio is 0.3"),
    ("llama4", "vision_config", {"intermediate_size": 96}, "intermediate_size is 96; 2 x 2 patches have 192"),
    ("llama4", "vision_config", {"vision_output_dim": 64}, "vision_output_dim is 64; only 40"),
    ("llama4", "vision_config", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("llama4", "vision_config", {"model_type": "pixtral"}, "only llama4_vision_model is supported"),
]


@pytest.mark.parametrize(("case", "part", "changes", "message"), REFUSED)
def test_unsupported_values_are_refused_by_name(case: str, part: str, changes: dict[str, Any], message: str) -> None:
    hf = copy.deepcopy(read_case(case).config)
    (hf[part] if part else hf).update(changes)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        get_family(hf["architectures"][0]).read_config(hf)


def test_a_wrapper_without_a_vision_part_has_no_tower() -> None:
    hf = read_hf_config("qwen3_vl")
    family = get_family(hf["architectures"][0])
    assert family.read_config(hf).encoder is not None
    assert family.read_config({key: value for key, value in hf.items() if key != "vision_config"}).encoder is None


def test_models_of_text_are_no_towers() -> None:
    hf = read_hf_config("llama3_tied")
    config = get_family(hf["architectures"][0]).read_config(hf)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a tower"):
        Tower(ModelSpecs(config, "float32"))


PLAIN = TowerSettings(patch_shape=(3, 4, 4), projector=Projector(dense=()), merge=2, positions="exact", side=4)


def test_grids_that_do_not_fit_are_refused() -> None:
    patches = np.zeros((16, 48), np.float32)
    with pytest.raises(ValueError, match="does not hold whole squares of 2 x 2"):
        count_rows(PLAIN, [Grid(1, 3, 4)])
    with pytest.raises(ValueError, match="is not a square of 4 patches"):
        make_batch(PLAIN, [Grid(1, 2, 8)], patches)
    with pytest.raises(ValueError, match="do not fit grids"):
        make_batch(PLAIN, [Grid(1, 4, 4)], patches[:12])
    with pytest.raises(ValueError, match="and 12 slots"):
        make_batch(PLAIN, [Grid(1, 4, 4)], patches, 12)
    with pytest.raises(ValueError, match="has more than 3 rows or columns"):
        count_rows(replace(PLAIN, positions="axial", side=3), [Grid(1, 2, 4)])


def test_rows_hold_the_patches_of_their_square() -> None:
    pixels = np.arange(16 * 16, dtype=np.float32).reshape(1, 1, 16, 16).repeat(3, 1)
    batch = make_batch(PLAIN, [Grid(1, 4, 4)], cut_patches(pixels, 4), 20)
    assert count_slots(PLAIN, [Grid(1, 4, 4)]) == batch.num_slots == 16
    # The first pixel of each patch, by row.
    firsts = np.asarray(batch.patches_pc)[:, 0][np.asarray(batch.rows_rg)[: int(batch.num_rows)]]
    assert firsts.tolist() == [[0, 4, 64, 68], [8, 12, 72, 76], [128, 132, 192, 196], [136, 140, 200, 204]]


def test_an_image_in_tiles_has_lines_without_padding() -> None:
    tiling = Tiling(tile=24, resolutions=((24, 48), (48, 48)))
    assert tiling.layout((20, 51)) == (1, 2)
    places = arrange(tiling, 2, (10, 40)).places_qk[:, 0]
    # The whole image, then the lines of two tiles side by side; a line of the picture is a half of one.
    assert places.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, NEWLINE, 6, 7, 10, 11, NEWLINE]
    tower = replace(PLAIN, merge=1, tiling=tiling)
    with pytest.raises(ValueError, match="has 3 tiles, not 2"):
        make_batch(tower, [Grid(1, 4, 4)] * 2, np.zeros((32, 48), np.float32), size=(20, 51))


def test_one_of_several_images_and_frames_are_not_split() -> None:
    tiling = Tiling(tile=12, resolutions=((12, 24),), splits_alone=True)
    tower = replace(PLAIN, merge=1, positions="exact", side=3, tiling=tiling)
    assert count_final_rows(tower, [Grid(1, 3, 3)], (9, 9)) == 10
    assert count_final_rows(tower, [Grid(1, 3, 3)] * 3, (9, 9)) == 9 + 3 * (4 + 1)  # lines of four, with padding
    assert arrange_whole(3).places_qk[:, 0].tolist() == [*range(9), NEWLINE]
    assert count_final_rows(tower, [Grid(5, 3, 3)], (9, 9), is_video=True) == 5 * 4 + 1
    places, weights = arrange_frames(3, 2)
    # Middles of halves of three places: between 0 and 1, and between 1 and 2, each nearer to the outer place.
    assert places[4].tolist() == [9, 10, 12, 13]
    np.testing.assert_allclose(weights[4], [0.5625, 0.1875, 0.1875, 0.0625])
    assert places[-1].tolist() == [NEWLINE] * 4
    with pytest.raises(ValueError, match="has 3 tiles, not 2"):
        count_final_rows(tower, [Grid(1, 3, 3)] * 2, (9, 9))
    with pytest.raises(ValueError, match="has 3 tiles, not 1"):
        count_final_rows(replace(tower, tiling=replace(tiling, splits_alone=False)), [Grid(1, 3, 3)], (9, 9))


@pytest.mark.parametrize(
    ("tower", "settings", "options", "num_rows"),
    [
        (replace(PLAIN, patch_shape=(48,)), {}, {}, 70),
        (replace(PLAIN, patch_shape=(48,)), {"max_soft_tokens": 140}, {}, 140),
        (replace(PLAIN, patch_shape=(48,)), {"max_soft_tokens": 140}, {"max_soft_tokens": 280}, 280),
        (replace(PLAIN, positions="nearest", side=8), {}, {}, 16),
        (replace(PLAIN, positions="bilinear", side=8), {}, {}, 0),
        (
            replace(PLAIN, merge=1, positions="exact", side=3, tiling=Tiling(tile=12, resolutions=((12, 24),))),
            {},
            {},
            4,
        ),
    ],
)
def test_the_rows_of_a_frame_are_bounded(
    tower: TowerSettings, settings: dict[str, int], options: dict[str, int], num_rows: int
) -> None:
    assert most_frame_rows(tower, settings, options) == num_rows

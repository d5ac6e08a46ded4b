"""Write tests/data/media: what transformers' processors with torch make of images, prompts and positions.

    pip install torch torchvision transformers==5.23.0 pillow        # the environment of scripts/peers.sh hf
    python scripts/make.py media_goldens

- tokenizer.json: a tokenizer of bytes, runs of newlines and the special tokens of all families.
- families.json: settings of the image processor, the model's config and options of a call, for each family.
- processors.npz: for each family and image, values of the patches at random places.
- prompts.json: texts, the images and videos in them, and the token ids that the processors of whole models make.
- videos.npz: the same of videos.
- positions.npz: random mixes of texts, images and videos, and what get_rope_index makes of them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from make import torchvision_operators  # noqa: F401

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "media"
NUM_VALUES = 256
SIZES = ((30, 47), (300, 200), (64, 900), (517, 389), (1, 1), (3, 190), (757, 1003), (900, 71), (7, 5))


def picture(height: int, width: int) -> Image.Image:
    """Return a picture of soft waves; tests make the same one."""
    y, x = np.mgrid[0:height, 0:width]
    waves = (127 + 100 * np.sin(x / 17) * np.cos(y / 23), 127 + 90 * np.cos(x / 11 + y / 40), 60 + 50 * np.sin(y / 7))
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8))


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: settings of the image processor, the model's config, options of a call
    "clip": (
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "patch_size": 14}},
        {},
    ),
    "clip_padded": (
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 31},
            "crop_size": {"height": 56, "width": 70},
        },
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "patch_size": 14}},
        {},
    ),
    "gemma3": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
        {"model_type": "gemma3", "mm_tokens_per_image": 4, "vision_config": {"patch_size": 14}},
        {},
    ),
    "gemma3_crops": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
        {"model_type": "gemma3", "mm_tokens_per_image": 4, "vision_config": {"patch_size": 14}},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 50},
    ),
    "gemma4": (
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
        {"model_type": "gemma4", "vision_config": {"patch_size": 16, "pooling_kernel_size": 3}},
        {},
    ),
    "gemma4_unified": (
        {"image_processor_type": "Gemma4UnifiedImageProcessor", "max_soft_tokens": 70},
        {"model_type": "gemma4_unified", "vision_config": {"patch_size": 16, "pooling_kernel_size": 3}},
        {},
    ),
    "glm4v": (
        {"image_processor_type": "Glm4vImageProcessor"},
        {"model_type": "glm4v", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {},
    ),
    "glm46v": (
        {"image_processor_type": "Glm46VImageProcessor"},
        {"model_type": "glm46v", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {},
    ),
    "internvl": (
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}},
        {"model_type": "internvl", "image_seq_length": 4, "vision_config": {"patch_size": [14, 14]}},
        {"crop_to_patches": True, "max_patches": 6},
    ),
    "idefics3": (
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 168},
            "max_image_size": {"longest_edge": 56},
        },
        {"model_type": "idefics3", "scale_factor": 2, "vision_config": {"patch_size": 14, "image_size": 56}},
        {},
    ),
    "smolvlm": (
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
        },
        {"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 14, "image_size": 56}},
        {},
    ),
    "llama4": (
        {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 56, "width": 56}, "max_patches": 6},
        {"model_type": "llama4", "vision_config": {"patch_size": 14, "image_size": 56, "pixel_shuffle_ratio": 0.5}},
        {},
    ),
    "llama4_canvas": (
        {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 56, "width": 56}},
        {"model_type": "llama4", "vision_config": {"patch_size": 14, "image_size": 56, "pixel_shuffle_ratio": 0.5}},
        {"resize_to_max_canvas": True, "max_patches": 9},
    ),
    "llava": (
        {
            "image_processor_type": "LlavaImageProcessor",
            "do_pad": True,
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        {"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14}},
        {},
    ),
    "llava_next": (
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
        },
        {"model_type": "llava_next", "vision_config": {"model_type": "clip_vision_model", "patch_size": 14}},
        {},
    ),
    "llava_onevision": (
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56 * rows, 56 * columns] for rows in range(1, 5) for columns in range(1, 5)],
        },
        {
            "model_type": "llava_onevision",
            "vision_aspect_ratio": "anyres_max_4",
            "vision_feature_select_strategy": "full",
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 56},
        },
        {},
    ),
    "pixtral": (
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 140}},
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "patch_size": 14},
        },
        {},
    ),
    "qwen2_vl": (
        {"image_processor_type": "Qwen2VLImageProcessor"},
        {"model_type": "qwen2_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {},
    ),
    "qwen3_vl": (
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 16,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
        {"size": {"shortest_edge": 2048, "longest_edge": 65536}},
    ),
    "siglip": (
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}},
        {"model_type": "paligemma", "vision_config": {"patch_size": 14}},
        {},
    ),
}
GEMMA4 = ("gemma4", "gemma4_unified")
"""Families whose processors give patches with their places, and padding."""
MODULES = {
    "clip_padded": "clip",
    "gemma3_crops": "gemma3",
    "internvl": "got_ocr2",
    "llama4_canvas": "llama4",
    "qwen3_vl": "qwen2_vl",
}


def image_processor(name: str) -> Any:
    """Return the processor of a family that works with torchvision."""
    settings, config, _ = FAMILIES[name]
    module = MODULES.get(name, name)
    settings = dict(settings)
    if name == "pixtral":
        side = config["vision_config"]["patch_size"] * config["spatial_merge_size"]
        settings["patch_size"] = {"height": side, "width": side}
    kind = getattr(
        import_module(f"transformers.models.{module}.image_processing_{module}"), settings.pop("image_processor_type")
    )
    return kind(**settings)


def patches_of(name: str, image: Image.Image) -> np.ndarray:
    """Return an image's patches, cut out of pixels by torch's unfold where the processor gives pixels."""
    _, config, options = FAMILIES[name]
    if name == "gemma3_crops":
        options = {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2, **options}
    outputs = image_processor(name)(image, return_tensors="pt", **options)
    pixels = outputs["pixel_values"].float()
    if name in GEMMA4:
        return pixels[0][outputs["image_position_ids"][0, :, 0] >= 0].numpy()
    if pixels.ndim == 2:
        return pixels.numpy()
    side = config["vision_config"]["patch_size"]
    side = side if isinstance(side, int) else side[0]
    columns = torch.nn.functional.unfold(pixels.reshape(-1, *pixels.shape[-3:]), side, stride=side)
    return columns.transpose(1, 2).reshape(-1, columns.shape[1]).numpy()


def write_processors() -> None:
    """Write the families, values of patches at random places, and the numbers of patches."""
    (FOLDER / "families.json").write_text(json.dumps(FAMILIES, separators=(",", ":")) + "\n")
    arrays: dict[str, np.ndarray] = {}
    for name in FAMILIES:
        for height, width in SIZES:
            patches = patches_of(name, picture(height, width))
            rng = np.random.default_rng(height)
            rows, columns = (rng.integers(0, most, NUM_VALUES) for most in patches.shape)
            arrays[f"{name}-{height}-{width}"] = patches[rows, columns]
            arrays[f"{name}-{height}-{width}-shape"] = np.array(patches.shape, np.int32)
    np.savez_compressed(FOLDER / "processors.npz", **arrays)


SPECIAL = [
    *("<s>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<|image>", "<|image|>", "<image|>"),
    *("<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("<image>", "<video>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
]


def write_tokenizer() -> None:
    """Write a tokenizer of bytes that merges newlines, with all special tokens, and a start token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "Ċ"
    merges = [(newline, newline), (newline * 2, newline), (newline * 2, newline * 2)]
    vocabulary = {
        token: number for number, token in enumerate([*alphabet, *(newline * number for number in (2, 3, 4))])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    FOLDER.mkdir(parents=True, exist_ok=True)
    backend.save(str(FOLDER / "tokenizer.json"), pretty=False)


def tokenizer(**marks: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the attributes that a processor looks for."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), pad_token="<s>", extra_special_tokens=marks
    )


def model_processor(name: str) -> Any:
    """Return the processor of a family's whole model."""
    _, config, _ = FAMILIES[name]
    images = image_processor(name)

    def of(family: str, kind: str) -> Any:
        return getattr(import_module(f"transformers.models.{family}.processing_{family}"), kind)

    def video(family: str, kind: str) -> Any:
        module = import_module(f"transformers.models.{family}.video_processing_{family}")
        return getattr(module, kind)(do_sample_frames=False, **VIDEO_SETTINGS.get(name, {}))

    qwen = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    gemma4 = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<video>", "boa_token": "<img>", "eoa_token": "</img>",
    }  # fmt: skip
    make = {
        "qwen2_vl": lambda: of("qwen2_vl", "Qwen2VLProcessor")(
            images, tokenizer(**qwen), video("qwen2_vl", "Qwen2VLVideoProcessor")
        ),
        "qwen3_vl": lambda: of("qwen3_vl", "Qwen3VLProcessor")(
            images, tokenizer(**qwen), video("qwen3_vl", "Qwen3VLVideoProcessor")
        ),
        "glm4v": lambda: of("glm4v", "Glm4vProcessor")(
            images,
            tokenizer(image_token="<|image|>", video_token="<|video|>"),
            video("glm4v", "Glm4vVideoProcessor"),
        ),
        "glm46v": lambda: of("glm46v", "Glm46VProcessor")(
            images,
            tokenizer(image_token="<|image|>", video_token="<|video|>"),
            video("glm46v", "Glm46VVideoProcessor"),
        ),
        "gemma3": lambda: of("gemma3", "Gemma3Processor")(
            images,
            tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"),
            image_seq_length=config["mm_tokens_per_image"],
        ),
        "clip": lambda: of("llava", "LlavaProcessor")(
            images,
            tokenizer(image_token="<image>"),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        "llava_next": lambda: of("llava_next", "LlavaNextProcessor")(
            images,
            tokenizer(image_token="<image>"),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        "llava_onevision": lambda: of("llava_onevision", "LlavaOnevisionProcessor")(
            images,
            tokenizer(image_token="<image>", video_token="<video>"),
            video("llava_onevision", "LlavaOnevisionVideoProcessor"),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_4",
        ),
        "pixtral": lambda: of("pixtral", "PixtralProcessor")(
            images, tokenizer(), patch_size=14, spatial_merge_size=config["spatial_merge_size"]
        ),
        "internvl": lambda: of("internvl", "InternVLProcessor")(
            images,
            tokenizer(
                start_image_token="<img>",
                end_image_token="</img>",
                context_image_token="<IMG_CONTEXT>",
                video_token="<video>",
            ),
            video("internvl", "InternVLVideoProcessor"),
            image_seq_length=config["image_seq_length"],
        ),
        "smolvlm": lambda: of("smolvlm", "SmolVLMProcessor")(
            images, tokenizer(image_token="<image>"), video("smolvlm", "SmolVLMVideoProcessor"), image_seq_len=4
        ),
        "idefics3": lambda: of("idefics3", "Idefics3Processor")(
            images, tokenizer(image_token="<image>"), image_seq_len=4
        ),
        "gemma4": lambda: of("gemma4", "Gemma4Processor")(
            of_features("gemma4", "Gemma4"), images, tokenizer(**gemma4), video("gemma4", "Gemma4VideoProcessor")
        ),
        "gemma4_unified": lambda: of("gemma4_unified", "Gemma4UnifiedProcessor")(
            of_features("gemma4_unified", "Gemma4Unified"),
            images,
            tokenizer(**gemma4),
            video("gemma4_unified", "Gemma4UnifiedVideoProcessor"),
        ),
    }  # fmt: skip
    make["llama4"] = lambda: of("llama4", "Llama4Processor")(images, tokenizer(), patch_size=14)
    make["gemma3_crops"] = make["gemma3"]
    return make[name]()


def of_features(family: str, kind: str) -> Any:
    """Return the extractor of sounds that Gemma 4's processors want; no sound comes."""
    module = import_module(f"transformers.models.{family}.feature_extraction_{family}")
    return getattr(module, f"{kind}AudioFeatureExtractor")()


PLACEHOLDERS = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "glm46v": "<|begin_of_image|><|image|><|end_of_image|>",
    "gemma3": "<start_of_image>",
    "gemma3_crops": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_unified": "<|image|>",
    "clip": "<image>",
    "llava_next": "<image>",
    "llava_onevision": "<image>",
    "pixtral": "[IMG]",
    "internvl": "<IMG_CONTEXT>",
    "idefics3": "<image>",
    "llama4": "<|image|>",
}
TEXTS = (
    ("What is <1>?", [(30, 47)]),
    ("<1>\nfirst\n\n\n<2><3>\n\nand so on", [(300, 200), (64, 190), (5, 5)]),
    ("<s>look:\n<1>\n<2>\n\n\n", [(500, 40), (77, 131)]),
)


def write_prompts() -> None:
    """Write texts with images and videos, and their token ids."""
    cases: list[dict[str, Any]] = []
    for name, placeholder in PLACEHOLDERS.items():
        processor = model_processor(name)
        settings, config, options = FAMILIES[name]
        for text, sizes in TEXTS:
            for number in range(len(sizes)):
                text = text.replace(f"<{number + 1}>", placeholder)
            outputs = processor(text=text, images=[picture(*size) for size in sizes], **options)
            cases.append(
                {
                    "settings": settings,
                    "config": config,
                    "options": options,
                    "text": text,
                    "sizes": sizes,
                    "ids": [int(token_id) for token_id in np.asarray(outputs["input_ids"]).reshape(-1)],
                }
            )
    cases += video_cases()
    (FOLDER / "prompts.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


CLIPS = ((6, 64, 96), (5, 300, 200))
CLIP_FPS = {"gemma4": 0.15, "gemma4_unified": 0.15, "smolvlm": 0.15}
"""Frames a second of slow videos: some frames are minutes after the first."""
VIDEO_SETTINGS: dict[str, dict[str, Any]] = {
    "internvl": {"size": {"height": 56, "width": 56}},
    "llava_onevision": {"size": {"height": 56, "width": 56}},
    "smolvlm": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
}
MARKED = "<|vision_start|><|video_pad|><|vision_end|>"


def clip(num_frames: int, height: int, width: int) -> np.ndarray:
    """Return frames that move down a picture, 4 pixels at a time; tests make the same ones."""
    pixels = np.asarray(picture(height + 4 * num_frames, width))
    return np.stack([pixels[4 * number : 4 * number + height] for number in range(num_frames)])


def video_cases() -> list[dict[str, Any]]:
    """Write values of patches of videos, and return prompts with them.

    Qwen3-VL's processor wants the placeholder without the marks around, or they would stay beside those that it writes.
    """
    texts = {
        "qwen2_vl": "see <|vision_start|><|video_pad|><|vision_end|> now",
        "qwen3_vl": "see <|video_pad|> now",
        "glm4v": "see <|begin_of_video|><|video|><|end_of_video|> now",
        "glm46v": "see <|begin_of_video|><|video|><|end_of_video|> now",
        "gemma4": "see <|video|> now",
        "gemma4_unified": "see <|video|> now",
        "internvl": "see <video>\nnow",
        "smolvlm": "see <video>\n\nnow",
        "llava_onevision": "see <video> now",
    }
    from transformers.video_utils import VideoMetadata

    cases: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for name, text in texts.items():
        for num_frames, height, width in CLIPS:
            frames = clip(num_frames, height, width)
            processor = model_processor(name)
            indices = [3 * number for number in range(num_frames)]
            fps = CLIP_FPS.get(name, 12.0)
            duration = 3 * num_frames / fps if num_frames == CLIPS[0][0] else None
            metadata = VideoMetadata(3 * num_frames, fps, frames_indices=indices, duration=duration)
            outputs = processor(text=text, videos=[frames], video_metadata=[metadata], return_tensors="pt")
            patches, grid = video_patches(name, outputs)
            rng = np.random.default_rng(num_frames)
            rows, columns = (rng.integers(0, most, NUM_VALUES) for most in patches.shape)
            arrays[f"{name}-{num_frames}-{height}-{width}"] = patches[rows, columns]
            marked = text.replace("<|video_pad|>", MARKED) if name == "qwen3_vl" else text
            cases.append(
                {
                    "config": FAMILIES[name][1],
                    "text": marked,
                    "video": [num_frames, height, width],
                    "settings": VIDEO_SETTINGS.get(name, {}),
                    "fps": fps,
                    "duration": duration,
                    "grid": grid,
                    "ids": outputs["input_ids"][0].tolist(),
                }
            )
    np.savez_compressed(FOLDER / "videos.npz", **arrays)
    return cases


def video_patches(name: str, outputs: Any) -> tuple[np.ndarray, list[int]]:
    """Return a video's patches and its grid: steps in time, and lines and columns of patches."""
    if "video_grid_thw" in outputs:
        return outputs["pixel_values_videos"].numpy(), outputs["video_grid_thw"][0].tolist()
    if name in GEMMA4:
        positions = outputs["video_position_ids"].numpy()
        columns, lines = (positions[0].max(axis=0) + 1).tolist()
        return outputs["pixel_values_videos"].numpy()[positions[..., 0] >= 0], [len(positions), lines, columns]
    pixels = outputs["pixel_values_videos" if "pixel_values_videos" in outputs else "pixel_values"].float()
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    side = 14
    columns = torch.nn.functional.unfold(pixels, side, stride=side).transpose(1, 2)
    return columns.reshape(-1, columns.shape[-1]).numpy(), [len(pixels), *(size // side for size in pixels.shape[-2:])]


ROPE_MODELS = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel",
               "qwen3_5": "Qwen3_5Model", "glm4v": "Glm4vModel"}  # fmt: skip


def write_positions() -> None:
    """Write random mixes as [modality, t, h, w, seconds per step] of parts, and their positions and deltas."""
    arrays: dict[str, np.ndarray] = {}
    for name, kind in ROPE_MODELS.items():
        model = getattr(import_module(f"transformers.models.{name}.modeling_{name}"), kind)
        vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2 if name == "qwen2_5_vl" else None)
        fake = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        fake.get_vision_position_ids = partial(model.get_vision_position_ids, fake)
        rng = np.random.default_rng(5)
        for case in range(8):
            parts, types, grids, seconds = random_parts(rng, name)
            mix = torch.tensor([types])
            extra = {"second_per_grid_ts": torch.tensor(seconds)} if name == "qwen2_5_vl" and seconds else {}
            positions, delta = model.get_rope_index(
                fake,
                mix,
                mix,
                image_grid_thw=torch.tensor(grids[1]) if grids[1] else None,
                video_grid_thw=torch.tensor(grids[2]) if grids[2] else None,
                **extra,
            )
            arrays[f"{name}-{case}-parts"] = np.array(parts, np.float64)
            arrays[f"{name}-{case}-positions"] = positions[:, 0].numpy().astype(np.int32)
            arrays[f"{name}-{case}-delta"] = np.array(int(delta), np.int32)
    np.savez_compressed(FOLDER / "positions.npz", **arrays)


def random_parts(
    rng: np.random.Generator, name: str
) -> tuple[list[list[float]], list[int], dict[int, list], list[float]]:
    """Return random parts, the modality of each token, the grids of each modality, and seconds of each video.

    A part of text is [0, tokens, 0, 0, 0]. A video of the models with timestamps has 3 tokens before each later step.
    """
    parts: list[list[float]] = []
    types: list[int] = []
    grids: dict[int, list] = {1: [], 2: []}
    seconds: list[float] = []
    splits = name not in ("qwen2_vl", "qwen2_5_vl")
    for _ in range(int(rng.integers(1, 5))):
        length = int(rng.integers(1, 9))
        parts.append([0, length, 0, 0, 0])
        types += [0] * length
        modality = int(rng.integers(1, 3))
        steps = 1 if modality == 1 else int(rng.integers(1, 5))
        height, width = (2 * int(side) for side in rng.integers(1, 7, 2))
        second = float(rng.choice([0.25, 0.5, 1.0, 0.7, 2.0]))
        parts.append([modality, steps, height, width, second])
        grids[modality].append([steps, height, width])
        if modality == 2:
            seconds.append(second)
        frame = [modality] * (height * width // 4)
        for step in range(steps):
            types += ([0] * 3 if splits and step else []) + frame
    if rng.integers(2):
        parts.append([0, 4, 0, 0, 0])
        types += [0] * 4
    return parts, types, grids, seconds


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(prog="make.py media_goldens", description=__doc__).parse_args(arguments)
    write_tokenizer()
    write_positions()
    write_processors()
    write_prompts()


if __name__ == "__main__":
    main()

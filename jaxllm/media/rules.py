"""What stands for an image or video in a prompt, and what it becomes, for each type of model.

A `Rule` names the placeholder of each modality and the token that takes a row of the tower's output. `pieces` gives
what a placeholder becomes: literal text, and numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.shapes import ItemShape

Pieces = list[str | int]
"""Texts that a placeholder becomes, and between them numbers of consecutive rows."""


@dataclass(frozen=True)
class Rule:
    """The placeholders of a type of model."""

    placeholders: Mapping[str, str]
    """For each modality, the text that stands for one item in a prompt."""
    rows: Mapping[str, str]
    """For each modality, the token that takes one row of the tower's output."""
    pieces: Callable[[ItemShape], Pieces]

    @property
    def reserved(self) -> tuple[str, ...]:
        """Return the texts that a user's message may not hold, since they would be read as media."""
        return tuple(dict.fromkeys([*self.placeholders.values(), *self.rows.values()]))


def find_rule(config: Mapping[str, Any]) -> Rule:
    """Return the rule of a model with this config.json.

    Raises VLLMValidationError for a type of model that takes no images here.
    """
    model_type = config.get("model_type", "")
    if config.get("vision_config", {}).get("model_type") == "pixtral":
        model_type = "pixtral"
    if model_type not in _RULES:
        raise VLLMValidationError(
            f"models of type {model_type!r} take no images; these do: {', '.join(sorted(_RULES))}",
            parameter="model",
            value=model_type,
        )
    return _RULES[model_type](config)


def most_rows(image_processor: Mapping[str, Any], options: Mapping[str, Any], *, row_side: int, tile_rows: int) -> int:
    """Return the most rows that an image takes, as far as the settings of its processor bound them; else 0.

    A row stands for a square of `row_side` pixels on a side, and a tile of a fixed size, if the model has these, takes
    `tile_rows` rows.
    """
    settings = {**image_processor, **options}
    size = {**(image_processor.get("size") or {}), **(options.get("size") or {})}
    longest = size.get("longest_edge")
    if tile_rows:
        tile = (settings.get("max_image_size") or {}).get("longest_edge")
        split = math.ceil(longest / tile) ** 2 if tile and longest else settings.get("max_patches", 0)
        crops = settings.get("pan_and_scan_max_num_crops") or 4 if settings.get("do_pan_and_scan") else 0
        return tile_rows * (1 + max(split, crops))
    if "merge_size" in settings:
        return (settings.get("max_pixels") or longest or 0) // row_side**2
    return (longest or 0) ** 2 // row_side**2


def _same(image: str, pieces: Callable[[ItemShape], Pieces], **others: str) -> Rule:
    """Return a rule of placeholders that are the tokens of rows themselves."""
    tokens = {"image": image, **others}
    return Rule(tokens, tokens, pieces)


def _vision_patch(config: Mapping[str, Any]) -> int:
    side = config["vision_config"]["patch_size"]
    return side if isinstance(side, int) else side[0]


def _merged_rows(shape: ItemShape, merge: int) -> list[int]:
    """Return the rows of each step in time of an item, whose patches are merged in squares."""
    return [height * width // merge**2 for time, height, width in shape.grids for _ in range(time)]


def _qwen2(config: Mapping[str, Any]) -> Rule:
    merge = config["vision_config"].get("spatial_merge_size", 2)
    return _same("<|image_pad|>", lambda shape: [sum(_merged_rows(shape, merge))], video="<|video_pad|>")


def _qwen3(config: Mapping[str, Any]) -> Rule:
    """A video is a sequence of frames, each after its second; they replace the marks around the placeholder too."""
    merge = config["vision_config"].get("spatial_merge_size", 2)

    def pieces(shape: ItemShape) -> Pieces:
        rows = _merged_rows(shape, merge)
        if shape.modality == "image":
            return [sum(rows)]
        return _frames(
            rows, [f"<{second:.1f} seconds><|vision_start|>" for second in shape.timestamps], "<|vision_end|>"
        )

    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    return Rule({**tokens, "video": "<|vision_start|><|video_pad|><|vision_end|>"}, tokens, pieces)


def _frames(rows: list[int], before: list[str], after: str) -> Pieces:
    """Return the pieces of a video: before each frame's rows its own text, after them the same."""
    texts = [before[0], *(after + text for text in before[1:]), after]
    return [piece for text, number in zip(texts, [*rows, 0], strict=True) for piece in (text, number)][:-1]


def _glm(config: Mapping[str, Any]) -> Rule:
    """A video's frames take the tokens of images; the whole second follows each."""
    merge = config["vision_config"].get("spatial_merge_size", 2)

    def pieces(shape: ItemShape) -> Pieces:
        rows = _merged_rows(shape, merge)
        if shape.modality == "image":
            return [sum(rows)]
        ends = [f"<|end_of_image|>{int(second)}" for second in shape.timestamps]
        texts = ["", *ends[:-1]]
        return [
            *(
                piece
                for text, number in zip(texts, rows, strict=True)
                for piece in (text + "<|begin_of_image|>", number)
            ),
            ends[-1],
        ]

    return Rule({"image": "<|image|>", "video": "<|video|>"}, {"image": "<|image|>", "video": "<|image|>"}, pieces)


def _gemma3(config: Mapping[str, Any]) -> Rule:
    rows = config.get("mm_tokens_per_image", 256)
    before, after = "\n\n<start_of_image>", "<end_of_image>\n\n"

    def pieces(shape: ItemShape) -> Pieces:
        crops = len(shape.grids) - 1
        if not crops:
            return [before, rows, after]
        intro = "Here is the original image "
        between = after + " and here are some crops to help you see better " + before
        return [intro + before, rows, between, *[rows, after + " " + before] * (crops - 1), rows, after]

    return Rule({"image": "<start_of_image>"}, {"image": "<image_soft_token>"}, pieces)


def _gemma4(config: Mapping[str, Any]) -> Rule:
    kernel = config["vision_config"].get("pooling_kernel_size", 3)

    def pieces(shape: ItemShape) -> Pieces:
        return ["<|image>", shape.num_patches // kernel**2, "<image|>"]

    return _same("<|image|>", pieces)


def _llava(config: Mapping[str, Any]) -> Rule:
    class_rows = _class_rows(config)
    return _same("<image>", lambda shape: [shape.num_patches + class_rows])


def _class_rows(config: Mapping[str, Any]) -> int:
    """Return the rows beside those of patches: CLIP's class token has one, and the first may be dropped."""
    is_clip = config["vision_config"].get("model_type") == "clip_vision_model"
    drops_first = config.get("vision_feature_select_strategy", "default") == "default"
    return int(is_clip) - int(drops_first)


def _any_resolution(config: Mapping[str, Any], *, most: int | None) -> Rule:
    """LLaVA-NeXT's and OneVision's: the whole image, then the tiles without their padding, each line with its end."""
    class_rows = _class_rows(config)

    def pieces(shape: ItemShape) -> Pieces:
        _, height, width = shape.grids[0]
        return [height * width + class_rows + _unpadded_rows(shape, most)]

    return _same("<image>", pieces)


def _unpadded_rows(shape: ItemShape, most: int | None) -> int:
    """Return the rows of an image's tiles: their lines without the padding, and one for the end of each line.

    The tiles are shrunk to `most` times the rows of one tile where they are more than that by a fifth.
    """
    _, tile_height, tile_width = shape.grids[0]
    height, width = tile_height * shape.layout[0], tile_width * shape.layout[1]
    original_height, original_width = shape.size
    if original_width / original_height > width / height:
        padding = (height - int(round(original_height * (width / original_width), 7))) // 2
        height -= 2 * padding
    else:
        padding = (width - int(round(original_width * (height / original_height), 7))) // 2
        width -= 2 * padding
    ratio = math.sqrt(height * width / (most * tile_height**2)) if most else 1.0
    if ratio > 1.1:
        height, width = int(height // ratio), int(width // ratio)
    return height * width + height


def _onevision(config: Mapping[str, Any]) -> Rule:
    return _any_resolution(
        config, most=int(config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
    )


def _pixtral(config: Mapping[str, Any]) -> Rule:
    """Each line of patches ends with a token of its own, the last with another."""
    merge = config.get("spatial_merge_size", 1)

    def pieces(shape: ItemShape) -> Pieces:
        _, height, width = shape.grids[0]
        lines, rows = height // merge, width // merge
        return [*[rows, "[IMG_BREAK]"] * (lines - 1), rows, "[IMG_END]"]

    return _same("[IMG]", pieces)


def _internvl(config: Mapping[str, Any]) -> Rule:
    rows = config.get("image_seq_length", 256)
    return _same("<IMG_CONTEXT>", lambda shape: ["<img>", rows * len(shape.grids), "</img>"])


def _idefics3(config: Mapping[str, Any]) -> Rule:
    """Each tile says its row and column; the whole image comes last."""
    vision = config["vision_config"]
    rows = (vision["image_size"] // vision["patch_size"]) ** 2 // config.get("scale_factor", 2) ** 2
    fake, whole = "<fake_token_around_image>", "<global-img>"

    def pieces(shape: ItemShape) -> Pieces:
        lines, columns = shape.layout
        result: Pieces = []
        for line in range(lines):
            for column in range(columns):
                end = "\n" if line and not column else ""
                result += [f"{end}{fake}<row_{line + 1}_col_{column + 1}>", rows]
        return [*result, ("\n\n" if lines else "") + fake + whole, rows, fake]

    return _same("<image>", pieces)


def _llama4(config: Mapping[str, Any]) -> Rule:
    """Tiles with separators between columns and after rows; the whole image comes last, behind a mark."""
    vision = config["vision_config"]
    rows = round((vision["image_size"] // vision["patch_size"] * vision.get("pixel_shuffle_ratio", 0.5)) ** 2)

    def pieces(shape: ItemShape) -> Pieces:
        lines, columns = shape.layout
        line: Pieces = [*[rows, "<|tile_x_separator|>"] * (columns - 1), rows, "<|tile_y_separator|>"]
        return ["<|image_start|>", *line * lines, "<|image|>", rows, "<|image_end|>"]

    return Rule({"image": "<|image|>"}, {"image": "<|patch|>"}, pieces)


_RULES: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm46v": _glm,
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llama4": _llama4,
    "llava": _llava,
    "llava_next": partial(_any_resolution, most=None),
    "llava_onevision": _onevision,
    "mistral3": _pixtral,
    "pixtral": _pixtral,
    "qwen2_5_vl": _qwen2,
    "qwen2_vl": _qwen2,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "smolvlm": _idefics3,
}

"""What stands for an image, a video or a sound in a prompt, and what it becomes, for each type of model.

A `Rule` names the placeholder of each modality and the token that takes a row of the tower's output. `pieces` gives
what a placeholder becomes: literal text, and numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.shapes import ItemShape

Pieces = list[str | int]
"""Texts that a placeholder becomes, and between them numbers of consecutive rows."""


@dataclass(frozen=True)
class Clips:
    """How the sounds of a type of model become the clips that its tower takes."""

    are_several: bool = False
    """A sound that is longer than a clip is cut into several; else it is refused."""
    are_whole: bool = False
    """The silence that fills up a clip is heard; else what follows the sound is left out."""
    are_apart: bool = False
    """Loudness is relative to the loudest moment of the clip, not of the whole sound."""
    end_in_zeros: bool = False
    """No silence follows the sound: a clip that is not whole has the columns of the sound alone."""
    chunk: int = 0
    """The columns that the tower hears at once, which become a frame for every eight; 0 if two are a frame."""
    columns: int = 0
    """The columns of a clip; 0 if the settings of the feature extractor say it."""
    least_samples: int = 0
    """Silence fills up shorter sounds."""


@dataclass(frozen=True)
class Rule:
    """The placeholders of a type of model."""

    placeholders: Mapping[str, str]
    """For each modality, the text that stands for one item in a prompt."""
    rows: Mapping[str, str]
    """For each modality, the token that takes one row of the tower's output."""
    of_patches: Callable[[ItemShape], Pieces]
    """What an item becomes by its patches."""
    of_rows: Callable[[int], Pieces] | None = None
    """What an item becomes by the number of its rows, where this suffices."""
    has_timestamps: bool = False
    """True if videos become text with the seconds of their steps in time."""
    has_intervals: bool = False
    """True if the seconds between a video's steps in time space their positions."""
    clips: Clips = Clips()
    """How sounds become clips, for a model that hears."""

    @property
    def reserved(self) -> tuple[str, ...]:
        """Return the texts that a user's message may not hold, since they would be read as media."""
        return tuple(dict.fromkeys([*self.placeholders.values(), *self.rows.values()]))

    def pieces(self, shape: ItemShape) -> Pieces:
        """Return what an item becomes, by its patches or, if these are not known, by the number of its rows."""
        if shape.num_rows is None or self.of_rows is None:
            return self.of_patches(shape)
        return self.of_rows(shape.num_rows)

    def count_rows(self, shape: ItemShape) -> int:
        """Return the number of rows that an item takes."""
        return sum(piece for piece in self.pieces(shape) if isinstance(piece, int))


def find_rule(config: Mapping[str, Any]) -> Rule:
    """Return the rule of a model with this config.json.

    Raises VLLMValidationError for a type of model that takes text alone here.
    """
    model_type = config.get("model_type", "")
    if config.get("vision_config", {}).get("model_type") == "pixtral":
        model_type = "pixtral"
    if model_type not in _RULES:
        raise VLLMValidationError(
            f"models of type {model_type!r} take text alone; these take more: {', '.join(sorted(_RULES))}",
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


def _same(
    image: str,
    of_patches: Callable[[ItemShape], Pieces],
    of_rows: Callable[[int], Pieces] | None = None,
    **others: str,
) -> Rule:
    """Return a rule of placeholders that are the tokens of rows themselves."""
    tokens = {"image": image, **others}
    return Rule(tokens, tokens, of_patches, of_rows)


def _alone(num_rows: int) -> Pieces:
    """Return the pieces of an image that is nothing but rows."""
    return [num_rows]


def _merged_rows(shape: ItemShape, merge: int) -> list[int]:
    """Return the rows of each step in time of an item, whose patches are merged in squares."""
    return [height * width // merge**2 for time, height, width in shape.grids for _ in range(time)]


def _qwen2(config: Mapping[str, Any]) -> Rule:
    vision = config["vision_config"]
    merge = vision.get("spatial_merge_size", 2)
    rule = _same("<|image_pad|>", lambda shape: [sum(_merged_rows(shape, merge))], video="<|video_pad|>")
    return replace(rule, has_intervals=vision.get("tokens_per_second") is not None)


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
    placeholders = {**tokens, "video": "<|vision_start|><|video_pad|><|vision_end|>"}
    return Rule(placeholders, tokens, pieces, has_timestamps=True)


def _frames(rows: list[int], before: list[str], after: str, between: str = "") -> Pieces:
    """Return the pieces of a video: before each frame's rows its own text, after them the same; and texts between."""
    texts = [before[0], *(after + between + text for text in before[1:]), after]
    return [piece for text, number in zip(texts, [*rows, 0], strict=True) for piece in (text, number)][:-1]


def _clock(second: float) -> str:
    """Return a time as minutes and seconds."""
    return f"{int(second // 60):02d}:{int(second % 60):02d}"


def _glm(config: Mapping[str, Any], *, says_seconds: bool = False) -> Rule:
    """A video's frames take the tokens of images; its second follows each, a whole number or in words."""
    merge = config["vision_config"].get("spatial_merge_size", 2)

    def pieces(shape: ItemShape) -> Pieces:
        rows = _merged_rows(shape, merge)
        if shape.modality == "image":
            return [sum(rows)]
        times = [f"{second:.1f} seconds" if says_seconds else int(second) for second in shape.timestamps]
        ends = [f"<|end_of_image|>{time}" for time in times]
        texts = ["", *ends[:-1]]
        return [
            *(
                piece
                for text, number in zip(texts, rows, strict=True)
                for piece in (text + "<|begin_of_image|>", number)
            ),
            ends[-1],
        ]

    tokens = {"image": "<|image|>", "video": "<|image|>"}
    return Rule({"image": "<|image|>", "video": "<|video|>"}, tokens, pieces, has_timestamps=True)


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

    tokens = {"image": config.get("image_token", "<image_soft_token>")}
    return Rule({"image": "<start_of_image>"}, tokens, pieces, lambda _: [before, rows, after])


def _gemma4(config: Mapping[str, Any], *, merges: bool = True) -> Rule:
    """A video's frames are marked like images, each after its time. Without a tower each patch is one row.

    A row of a sound is a frame of 40 ms.
    """
    kernel = config["vision_config"].get("pooling_kernel_size", 3) if merges else 1

    def pieces(shape: ItemShape) -> Pieces:
        if shape.modality == "audio":
            return ["<|audio>", shape.num_patches, "<audio|>"]
        rows = _merged_rows(shape, kernel)
        if shape.modality == "image":
            return of_rows(sum(rows))
        return _frames(rows, [f"{_clock(second)} <|image>" for second in shape.timestamps], "<image|>", " ")

    def of_rows(num_rows: int) -> Pieces:
        return ["<|image>", num_rows, "<image|>"]

    hears = {"audio": "<|audio|>"} if merges and config.get("audio_config") else {}
    return _same("<|image|>", pieces, of_rows, video="<|video|>", **hears)


def _llava(config: Mapping[str, Any]) -> Rule:
    class_rows = _class_rows(config)
    return _same("<image>", lambda shape: [shape.num_patches + class_rows], _alone)


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

    return _same("<image>", pieces, _alone)


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
    """An image beside others is not split; a video's frames have half as many lines and columns. One row ends both."""
    image = _any_resolution(
        config, most=int(config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
    )

    def pieces(shape: ItemShape) -> Pieces:
        steps, height, width = shape.grids[0]
        if shape.modality == "video":
            return [steps * math.ceil(height / 2) * math.ceil(width / 2) + 1]
        return [height * width + 1] if len(shape.grids) == 1 else image.pieces(shape)

    return _same("<image>", pieces, image.of_rows, video="<video>")


def _pixtral(config: Mapping[str, Any]) -> Rule:
    """Each line of patches ends with a token of its own, the last with another."""
    merge = config.get("spatial_merge_size", 1)

    def pieces(shape: ItemShape) -> Pieces:
        _, height, width = shape.grids[0]
        lines, rows = height // merge, width // merge
        return [*[rows, "[IMG_BREAK]"] * (lines - 1), rows, "[IMG_END]"]

    return _same("[IMG]", pieces)


def _internvl(config: Mapping[str, Any]) -> Rule:
    """A video's frames are numbered, each a line with the marks and tokens of an image."""
    rows = config.get("image_seq_length", 256)

    def pieces(shape: ItemShape) -> Pieces:
        if shape.modality == "image":
            return of_rows(rows * len(shape.grids))
        numbers = range(1, len(shape.timestamps) + 1)
        return _frames([rows] * len(numbers), [f"Frame{number}: <img>" for number in numbers], "</img>", "\n")

    def of_rows(num_rows: int) -> Pieces:
        return ["<img>", num_rows, "</img>"]

    row = "<IMG_CONTEXT>"
    return Rule({"image": row, "video": "<video>"}, {"image": row, "video": row}, pieces, of_rows)


_FAKE, _WHOLE = "<fake_token_around_image>", "<global-img>"


def _tile_rows(config: Mapping[str, Any]) -> int:
    """Return the rows of one of Idefics 3's tiles."""
    vision = config["vision_config"]
    return (vision["image_size"] // vision["patch_size"]) ** 2 // config.get("scale_factor", 2) ** 2


def _idefics3(config: Mapping[str, Any]) -> Rule:
    """Each tile says its row and column; the whole image comes last."""
    rows, fake, whole = _tile_rows(config), _FAKE, _WHOLE

    def pieces(shape: ItemShape) -> Pieces:
        lines, columns = shape.layout
        result: Pieces = []
        for line in range(lines):
            for column in range(columns):
                end = "\n" if line and not column else ""
                result += [f"{end}{fake}<row_{line + 1}_col_{column + 1}>", rows]
        return [*result, ("\n\n" if lines else "") + fake + whole, rows, fake]

    return _same("<image>", pieces)


def _smolvlm(config: Mapping[str, Any]) -> Rule:
    """Images are Idefics 3's; a video says how long it is, and each frame its time."""
    image = _idefics3(config)
    rows = _tile_rows(config)

    def pieces(shape: ItemShape) -> Pieces:
        if shape.modality == "image":
            return image.pieces(shape)
        number, length = len(shape.timestamps), timedelta(seconds=int(shape.duration))
        intro = (
            f"You are provided the following series of {_in_words(number)} frames from a {length} [H:MM:SS] video.\n"
        )
        before = [f"\nFrame from {_clock(second)}:{_FAKE}{_WHOLE}" for second in shape.timestamps]
        before[0] = intro + before[0]
        return [*_frames([rows] * number, before, _FAKE)[:-1], _FAKE + "\n\n"]

    return Rule({"image": "<image>", "video": "<video>"}, {"image": "<image>", "video": "<image>"}, pieces)


_ONES = (
    *("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _in_words(number: int) -> str:
    """Return a number from 1 to 999 in English."""
    hundreds, rest = divmod(number, 100)
    small = _ONES[rest] if rest < 20 else "-".join(filter(None, (_TENS[rest // 10], _ONES[rest % 10])))
    return " and ".join(filter(None, (f"{_ONES[hundreds]} hundred" if hundreds else "", small)))


def _llama4(config: Mapping[str, Any]) -> Rule:
    """Tiles with separators between columns and after rows; the whole image comes last, behind a mark."""
    vision = config["vision_config"]
    rows = round((vision["image_size"] // vision["patch_size"] * vision.get("pixel_shuffle_ratio", 0.5)) ** 2)

    def pieces(shape: ItemShape) -> Pieces:
        lines, columns = shape.layout
        line: Pieces = [*[rows, "<|tile_x_separator|>"] * (columns - 1), rows, "<|tile_y_separator|>"]
        return ["<|image_start|>", *line * lines, "<|image|>", rows, "<|image_end|>"]

    return Rule({"image": "<|image|>"}, {"image": "<|patch|>"}, pieces)


FRAME_SAMPLES = 320
"""The samples of a sound, 16,000 a second, that a frame of an audio tower stands for."""


def _qwen2_audio(_: Mapping[str, Any]) -> Rule:
    """A row is the mean of two frames."""
    tokens = {"audio": "<|AUDIO|>"}
    return Rule(tokens, tokens, lambda shape: [math.ceil(shape.size[1] / FRAME_SAMPLES) // 2], _alone)


def _voxtral(_: Mapping[str, Any]) -> Rule:
    """A row is four frames, those of the silence that fills up the last clip among them."""
    row = "[AUDIO]"
    placeholders, clips = {"audio": "[BEGIN_AUDIO][AUDIO]"}, Clips(are_several=True, are_whole=True)

    def pieces(shape: ItemShape) -> Pieces:
        return of_rows(shape.num_patches // 4)

    def of_rows(num_rows: int) -> Pieces:
        return ["[BEGIN_AUDIO]", num_rows]

    return Rule(placeholders, {"audio": row}, pieces, of_rows, clips=clips)


def _glm_asr(_: Mapping[str, Any]) -> Rule:
    """A row is four frames that the sound reaches."""
    tokens, clips = {"audio": "<|pad|>"}, Clips(are_several=True, are_whole=True, are_apart=True)
    return Rule(tokens, tokens, lambda shape: [math.ceil(shape.size[1] / FRAME_SAMPLES) // 4], _alone, clips=clips)


def _qwen3_asr(config: Mapping[str, Any]) -> Rule:
    """A row is a frame. A clip has four of the tower's windows of attention."""
    tokens, audio = {"audio": "<|audio_pad|>"}, config.get("audio_config") or {}
    chunk, columns = 2 * (audio.get("n_window") or 50), 4 * (audio.get("n_window_infer") or 800)
    clips = Clips(are_several=True, end_in_zeros=True, chunk=chunk, columns=columns, least_samples=8000)
    return Rule(tokens, tokens, lambda shape: [shape.num_patches], _alone, clips=clips)


def _ultravox(config: Mapping[str, Any]) -> Rule:
    """A row is eight frames, or as many as the config says; those of a clip's last row may be fewer."""
    group = config.get("stack_factor") or 8
    clips = Clips(are_several=True, end_in_zeros=True, least_samples=2 * 160)

    def pieces(shape: ItemShape) -> Pieces:
        return [sum(math.ceil(width / group) for _, _, width in shape.grids)]

    # The placeholder need not be a token. What stands for a row is one that texts of Llama 3 never have.
    return Rule({"audio": "<|audio|>"}, {"audio": "<|reserved_special_token_0|>"}, pieces, _alone, clips=clips)


_RULES: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": partial(_gemma4, merges=False),
    "glm46v": partial(_glm, says_seconds=True),
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "glmasr": _glm_asr,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llama4": _llama4,
    "llava": _llava,
    "llava_next": partial(_any_resolution, most=None),
    "llava_onevision": _onevision,
    "mistral3": _pixtral,
    "pixtral": _pixtral,
    "qwen2_5_vl": _qwen2,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen2,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen3_asr": _qwen3_asr,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "smolvlm": _smolvlm,
    "ultravox": _ultravox,
    "voxtral": _voxtral,
}

"""Settle how an engine's prompts refer to images, videos and sounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.config.arguments import EngineArguments
from jaxllm.core_messages import EMBEDS_PART
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import DEFAULT_LIMIT, ClipInput, MediaSettings, Modality, split_options, video_sampling
from jaxllm.media.rules import find_rule, most_rows
from jaxllm.params.checks import check_int

if TYPE_CHECKING:
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.models.towers.settings import TowerSettings
    from jaxllm.resolve.engine_config import EngineConfig

logger = logging.getLogger(__name__)

_SEEN: tuple[Modality, ...] = ("image", "video")
_MODALITIES: tuple[Modality, ...] = (*_SEEN, "audio")
_OTHERS: Mapping[str, int] = {"vision_chunk": 0}
"""The most items of other modalities that a prompt has here."""
_ROWS_OF_FRAMES = 8192
"""The rows up to which a video's frames are counted unless their number is asked for."""


class Senses(NamedTuple):
    """Which towers an engine is to load, of those that its model has."""

    sees: bool
    hears: bool


class MediaSize(NamedTuple):
    """What an engine's feature cache and its towers' programs hold."""

    num_rows: int = 0
    """The rows of the feature cache of images, videos, sounds and prompts of embeddings; 0 where there are none."""
    num_frames: int = 0
    """The most frames of a video; 0 where there are no videos."""


def media_settings(config: EngineConfig) -> MediaSettings | None:
    """Return how prompts refer to media, and how they are read; None for a model that never takes any.

    Raises VLLMValidationError for a model whose images cannot be read.
    """
    encoder, towers, args = config.model_config.encoder, config.model_config.towers, config.args
    if encoder is not None and encoder.clips is not None:
        _check_unused(args, config.model_config.architecture, _OF_SIGHT)
        start = config.hf_config.get("decoder_start_token_id")
        if start is None:
            start = config.generation_config.get("decoder_start_token_id", 50_257)
        return MediaSettings(
            clips=ClipInput(**encoder.clips._asdict(), start_token_id=start),
            allowed_local_media_path=args.allowed_local_media_path,
            allowed_media_domains=args.allowed_media_domains,
        )
    if not towers:
        _check_unused(args, config.model_config.architecture)
        reason = config.checkpoint.text_only
        return MediaSettings(text_only=reason) if reason else None
    hf_config = _media_config(config)
    rule = find_rule(hf_config)
    sight, hearing = _find_towers(config)
    loaded = {"image": sight, "video": sight, "audio": hearing}
    placeholders = {each: text for each, text in rule.placeholders.items() if loaded[each] is not None}
    if sight is not None:
        from jaxllm.media.processors import check_kind  # which loads numpy

        check_kind(config.checkpoint.image_processor)
    options, sampling = _processing(config)
    return MediaSettings(
        image_placeholder=placeholders.get("image"),
        video_placeholder=placeholders.get("video"),
        audio_placeholder=placeholders.get("audio"),
        reserved=rule.reserved,
        limits=media_limits(args),
        max_model_len=config.max_model_len,
        interleave_mm_strings=args.interleave_mm_strings,
        enable_mm_embeds=args.enable_mm_embeds,
        row_size=next(iter(towers.values())).output_size,
        most_rows=media_size(config).num_rows,
        config=hf_config,
        image_processor=dict(config.checkpoint.image_processor),
        video_processor=dict(config.checkpoint.video_processor),
        audio_processor=dict(config.checkpoint.audio_processor),
        sampling=sampling,
        options=options,
        cache_gb=args.mm_processor_cache_gb,
        allowed_local_media_path=args.allowed_local_media_path,
        allowed_media_domains=args.allowed_media_domains,
        rope_merge=sight.merge if sight and any(rope.axes for rope in config.model_config.ropes) else None,
        steps_per_second=hf_config.get("vision_config", {}).get("tokens_per_second"),
    )


def media_size(config: EngineConfig) -> MediaSize:
    """Return the size of an engine's feature cache, and the most frames of its videos.

    Raises VLLMValidationError for options that the model's processor does not have, and for wrong values.
    """
    sight, hearing = _find_towers(config)
    if sight is None and hearing is None:
        return MediaSize(max(config.max_num_batched_tokens, EMBEDS_PART) if config.args.enable_prompt_embeds else 0)
    seen = MediaSize() if sight is None else _seen_size(config, sight)
    largest = max(seen.num_rows, 0 if hearing is None else most_sound_rows(config))
    return MediaSize(max(config.max_num_batched_tokens, min(config.max_model_len, largest)), seen.num_frames)


def _find_towers(config: EngineConfig) -> tuple[TowerSettings | None, TowerSettings | None]:
    """Return the settings of the tower that sees, and of the one that hears; None for one that the engine has not."""
    towers = config.model_config.towers.values()
    hearing = next((tower for tower in towers if tower.sound is not None), None)
    return next((tower for tower in towers if tower.sound is None), None), hearing


def _seen_size(config: EngineConfig, tower: TowerSettings) -> MediaSize:
    """Return the most rows of an image or a video, as far as they are bounded, and the most frames of a video."""
    checkpoint, (options, sampling) = config.checkpoint, _processing(config)
    largest, num_frames = most_image_rows(tower, checkpoint.image_processor, options), 0
    if "video" in find_rule(config.hf_config).placeholders and media_limits(config.args).get("video", DEFAULT_LIMIT):
        per_frame = most_frame_rows(tower, checkpoint.video_processor, options)
        patches = per_frame * tower.group if tower.tiling is None else tower.side**2
        num_frames = most_frames(sampling, patches * tower.patch_dim // 3)
        if per_frame and sampling.keys().isdisjoint(("num_frames", "max_frames")):
            num_frames = min(num_frames, max(1, max(config.max_num_batched_tokens, _ROWS_OF_FRAMES) // per_frame))
        ends_with_row = tower.tiling is not None and tower.tiling.splits_alone
        largest = max(largest, num_frames * per_frame + ends_with_row)
    return MediaSize(largest, num_frames)


def most_sound_rows(config: EngineConfig) -> int:
    """Return the rows of the longest sound.

    Raises VLLMValidationError for a checkpoint with a feature extractor that is not supported.
    """
    from jaxllm.media.audio.processor import make_audio_processor  # which loads numpy

    rule = find_rule(_media_config(config))
    processor = make_audio_processor(config.checkpoint.audio_processor, rule.clips)
    return rule.count_rows(processor.shape(processor.most_samples))


def most_frames(sampling: Mapping[str, Any], pixels: int) -> int:
    """Return the most frames that `sampling` takes of a video; `pixels` are those of a frame, 0 if not bounded."""
    from jaxllm.media.frames import Sampling  # which loads numpy
    from jaxllm.media.video_processor import MAX_VIDEO_PIXELS

    taken = Sampling().merged(sampling)
    wanted = taken.max_frames if taken.fps is not None else min(taken.num_frames, taken.max_frames)
    return min(wanted, MAX_VIDEO_PIXELS // pixels) if pixels else wanted


def most_image_rows(tower: TowerSettings, image_processor: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """Return the most rows that an image takes, as far as the settings of the model and its processor bound them."""
    tile_rows = tower.side**2 // tower.group if tower.positions in ("exact", "nearest") else 0
    if tower.tiling is not None:  # with a row behind each line of the tiles' rows
        return tower.tiling.most_tiles * (tile_rows + tower.side)
    if len(tower.patch_shape) < 2:  # one number: patches lie flat
        return int({**image_processor, **options}.get("max_soft_tokens", 0))
    row_side = tower.merge * tower.patch_size[0]
    return most_rows(image_processor, options, row_side=row_side, tile_rows=tile_rows)


def most_frame_rows(tower: TowerSettings, video_processor: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """Return the most rows that a frame of a video takes; 0 where the rows of all frames are bounded together."""
    if tower.tiling is not None:
        return math.ceil(tower.side / 2) ** 2
    if len(tower.patch_shape) < 2:
        return int({"max_soft_tokens": 70, **video_processor, **options}["max_soft_tokens"])
    return tower.side**2 // tower.group if tower.positions in ("exact", "nearest") else 0


def _media_config(config: EngineConfig) -> dict[str, Any]:
    """Return a model's config.json without its text part."""
    hf_config = {name: value for name, value in config.hf_config.items() if name != "text_config"}
    if str(config.checkpoint.image_processor.get("image_processor_type")).startswith("Glm46V"):
        # GLM-4.6V is published as a GLM-4.1V or GLM-4.5V with a processor of its own.
        hf_config["model_type"] = "glm46v"
    return hf_config


def _processing(config: EngineConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the engine's processors, and which frames of videos are taken.

    Raises VLLMValidationError for options that the image processor does not have, and for wrong values.
    """
    if _find_towers(config)[0] is None:
        _check_unused(config.args, config.model_config.architecture, _OF_SIGHT, "sees")
        return {}, {}
    options, sampling = dict(config.args.mm_processor_kwargs), video_sampling(config.args.media_io_kwargs)
    hf_config, image_processor = _media_config(config), config.checkpoint.image_processor
    if "video" in find_rule(hf_config).placeholders:
        options, sampling = split_options(options, sampling)
    if options and image_processor:
        from jaxllm.media.processors import ImageProcessor

        processor = ImageProcessor(image_processor, hf_config)  # which imports transformers
        try:
            processor.check(options)
        except VLLMValidationError as error:
            raise VLLMValidationError(str(error), parameter="mm_processor_kwargs", value=error.value) from None
    return options, dict(sampling)


_OF_SIGHT = ("mm_processor_kwargs", "media_io_kwargs", "enable_mm_embeds")
_OF_MEDIA = (*_OF_SIGHT, "allowed_local_media_path", "allowed_media_domains")


def _check_unused(
    args: EngineArguments, architecture: str, names: tuple[str, ...] = _OF_MEDIA, does: str = "sees or hears"
) -> None:
    """Raise VLLMValidationError for an argument that only a model that sees, or one that hears, has a use for."""
    for name in names:
        if value := getattr(args, name):
            message = f"{name} is for a model that {does}, and {architecture} does not here. Leave it out."
            raise VLLMValidationError(message, parameter=name, value=value)


def media_limits(args: EngineArguments) -> dict[Modality, int]:
    """Return the most items of each modality that a prompt may have, from limit_mm_per_prompt.

    Raises VLLMValidationError for another modality, unless its limit is 0, and for anything but a number or
    {"count": number}.
    """
    limits: dict[Modality, int] = {}
    for name, value in args.limit_mm_per_prompt.items():
        modality: Modality | None = next((each for each in _MODALITIES if each == name), None)
        if modality is None:
            most = _OTHERS.get(name, -1)
            if value in [limit for count in range(most + 1) for limit in (count, {"count": count})]:
                continue
            raise VLLMValidationError(
                f"limit_mm_per_prompt: {name!r} is not supported: the keys are {', '.join(_MODALITIES)}.",
                parameter="limit_mm_per_prompt",
                value=name,
            )
        if isinstance(value, dict) and value.keys() - {"count"}:
            message = f"limit_mm_per_prompt[{name!r}]: only 'count' is supported, got {', '.join(map(str, value))}."
            raise VLLMValidationError(message, parameter="limit_mm_per_prompt", value=name)
        count: Any = value.get("count", DEFAULT_LIMIT) if isinstance(value, dict) else value
        limits[modality] = check_int(
            f"limit_mm_per_prompt[{name!r}]", count, 0, DEFAULT_LIMIT, parameter="limit_mm_per_prompt"
        )
    return limits


def takes_images(args: EngineArguments) -> bool:
    """Return whether an engine is to load the vision tower of a model that has one."""
    return _takes(args, _SEEN)


def find_senses(args: EngineArguments, checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> Senses:
    """Return which towers of a model an engine is to load.

    There is none for a checkpoint without the settings of what makes its inputs; a warning says so.
    """
    wanted = Senses(_takes(args, _SEEN), _takes(args, ("audio",)))
    has_tower = Senses(bool(hf_config.get("vision_config")), bool(hf_config.get("audio_config")))
    has_processor = Senses(bool(checkpoint.image_processor), bool(checkpoint.audio_processor))
    senses = Senses(*(w and (p or not t) for w, t, p in zip(wanted, has_tower, has_processor, strict=True)))
    if senses != wanted:
        is_left = any(map(all, zip(senses, has_tower, strict=True)))
        lost = "sees nothing" if senses.sees != wanted.sees else "hears nothing"
        message = "%s has no preprocessor_config.json%s: it %s"
        of = f" with settings of {'images' if lost == 'sees nothing' else 'sounds'}" if is_left else ""
        logger.warning(message, checkpoint.source, of, lost if is_left else "reads text alone")
    return senses


def _takes(args: EngineArguments, modalities: tuple[Modality, ...]) -> bool:
    limits = media_limits(args)
    return not args.language_model_only and any(limits.get(each, DEFAULT_LIMIT) for each in modalities)

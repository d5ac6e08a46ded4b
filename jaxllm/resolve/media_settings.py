"""Settle how an engine's prompts refer to images, videos and sounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.config.arguments import EngineArguments
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


class MediaSize(NamedTuple):
    """What an engine's feature cache and its tower's programs hold."""

    num_rows: int = 0
    """The rows of the feature cache of images and videos; 0 for a model that sees none."""
    num_frames: int = 0
    """The most frames of a video; 0 where there are no videos."""


def media_settings(config: EngineConfig) -> MediaSettings | None:
    """Return how prompts refer to media, and how they are read; None for a model that never takes any.

    Raises VLLMValidationError for a model whose images cannot be read.
    """
    encoder, args = config.model_config.encoder, config.args
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
    if encoder is None or encoder.tower is None:
        _check_unused(args, config.model_config.architecture)
        reason = config.checkpoint.text_only
        return MediaSettings(text_only=reason) if reason else None
    hf_config = _media_config(config)
    rule = find_rule(hf_config)
    placeholders = rule.placeholders
    if encoder.tower.sound is None:
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
        row_size=encoder.tower.output_size,
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
        rope_merge=encoder.tower.merge if any(rope.axes for rope in config.model_config.ropes) else None,
        steps_per_second=hf_config.get("vision_config", {}).get("tokens_per_second"),
    )


def media_size(config: EngineConfig) -> MediaSize:
    """Return the size of an engine's feature cache, and the most frames of its videos.

    Raises VLLMValidationError for options that the model's processor does not have, and for wrong values.
    """
    encoder = config.model_config.encoder
    if encoder is None or encoder.tower is None:
        return MediaSize()
    tower, checkpoint = encoder.tower, config.checkpoint
    options, sampling = _processing(config)
    if tower.sound is not None:
        return MediaSize(max(config.max_num_batched_tokens, min(config.max_model_len, most_sound_rows(config))))
    largest, num_frames = most_image_rows(tower, checkpoint.image_processor, options), 0
    if "video" in find_rule(config.hf_config).placeholders and media_limits(config.args).get("video", DEFAULT_LIMIT):
        per_frame = most_frame_rows(tower, checkpoint.video_processor, options)
        patches = per_frame * tower.group if tower.tiling is None else tower.side**2
        num_frames = most_frames(sampling, patches * tower.patch_dim // 3)
        if per_frame and sampling.keys().isdisjoint(("num_frames", "max_frames")):
            num_frames = min(num_frames, max(1, max(config.max_num_batched_tokens, _ROWS_OF_FRAMES) // per_frame))
        ends_with_row = tower.tiling is not None and tower.tiling.splits_alone
        largest = max(largest, num_frames * per_frame + ends_with_row)
    return MediaSize(max(config.max_num_batched_tokens, min(config.max_model_len, largest)), num_frames)


def most_sound_rows(config: EngineConfig) -> int:
    """Return the rows of the longest sound.

    Raises VLLMValidationError for a checkpoint with a feature extractor that is not supported.
    """
    from jaxllm.media.audio.processor import AudioProcessor  # which loads numpy

    rule = find_rule(_media_config(config))
    processor = AudioProcessor(config.checkpoint.audio_processor, rule.clips)
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
    if config.checkpoint.audio_processor and "audio" in find_rule(_media_config(config)).placeholders:
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


def takes_media(args: EngineArguments, checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> bool:
    """Return whether an engine is to load the tower of a model that sees or hears.

    A checkpoint without the settings of what makes the tower's inputs reads text alone; a warning says so.
    """
    hears = not hf_config.get("vision_config") and bool(hf_config.get("audio_config"))
    sees = bool(hf_config.get("vision_config"))
    if not _takes(args, ("audio",) if hears else _SEEN):
        return False
    if (sees and not checkpoint.image_processor) or (hears and not checkpoint.audio_processor):
        logger.warning("%s has no preprocessor_config.json: it reads text alone", checkpoint.source)
        return False
    return True


def _takes(args: EngineArguments, modalities: tuple[Modality, ...]) -> bool:
    limits = media_limits(args)
    return not args.language_model_only and any(limits.get(each, DEFAULT_LIMIT) for each in modalities)

"""Settle how an engine's prompts refer to images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.config.arguments import EngineArguments
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import DEFAULT_LIMIT, MediaSettings, Modality, video_sampling
from jaxllm.media.rules import find_rule, most_rows
from jaxllm.params.checks import check_int

if TYPE_CHECKING:
    from jaxllm.models.towers.settings import TowerSettings
    from jaxllm.resolve.engine_config import EngineConfig

_MODALITIES: tuple[Modality, ...] = ("image", "video")


def media_settings(config: EngineConfig) -> MediaSettings | None:
    """Return how prompts refer to media, and how they are read; None for a model that takes text only.

    Raises VLLMValidationError for a model whose images cannot be read.
    """
    vision, args = config.model_config.vision, config.args
    if vision is None or vision.tower is None:
        _check_unused(args, config.model_config.architecture)
        return None
    hf_config = {name: value for name, value in config.hf_config.items() if name != "text_config"}
    from jaxllm.media.processors import check_kind  # which loads numpy

    check_kind(config.checkpoint.image_processor)
    rule = find_rule(hf_config)
    placeholders = rule.placeholders
    return MediaSettings(
        image_placeholder=placeholders.get("image"),
        video_placeholder=placeholders.get("video"),
        reserved=rule.reserved,
        limits=media_limits(args),
        max_model_len=config.max_model_len,
        interleave_mm_strings=args.interleave_mm_strings,
        config=hf_config,
        image_processor=dict(config.checkpoint.image_processor),
        video_processor=dict(config.checkpoint.video_processor),
        sampling=video_sampling(args.media_io_kwargs),
        options=args.mm_processor_kwargs,
        cache_gb=args.mm_processor_cache_gb,
        allowed_local_media_path=args.allowed_local_media_path,
        allowed_media_domains=args.allowed_media_domains,
        rope_merge=vision.tower.merge if any(rope.axes for rope in config.model_config.ropes) else None,
        steps_per_second=hf_config.get("vision_config", {}).get("tokens_per_second"),
    )


def count_media_rows(config: EngineConfig) -> int:
    """Return the rows of an engine's feature cache of images and videos; 0 for a model that sees none."""
    vision = config.model_config.vision
    if vision is None or vision.tower is None:
        return 0
    largest = most_image_rows(vision.tower, config.checkpoint.image_processor, config.args.mm_processor_kwargs)
    return max(config.max_num_batched_tokens, min(config.max_model_len, largest))


def most_image_rows(tower: TowerSettings, image_processor: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """Return the most rows that an image takes, as far as the settings of the model and its processor bound them."""
    tile_rows = tower.side**2 // tower.group if tower.positions in ("exact", "nearest") else 0
    if tower.tiling is not None:  # with a row behind each line of the tiles' rows
        return tower.tiling.most_tiles * (tile_rows + tower.side)
    if len(tower.patch_shape) < 2:  # one number: patches lie flat
        return int({**image_processor, **options}.get("max_soft_tokens", 0))
    row_side = tower.merge * tower.patch_size[0]
    return most_rows(image_processor, options, row_side=row_side, tile_rows=tile_rows)


def _check_unused(args: EngineArguments, architecture: str) -> None:
    """Raise VLLMValidationError for an argument that only a model that sees has a use for."""
    for name in ("mm_processor_kwargs", "media_io_kwargs", "allowed_local_media_path", "allowed_media_domains"):
        if value := getattr(args, name):
            message = f"{name} is for models that see, and {architecture} reads text alone here. Leave it out."
            raise VLLMValidationError(message, parameter=name, value=value)


def media_limits(args: EngineArguments) -> dict[Modality, int]:
    """Return the most items of each modality that a prompt may have, from limit_mm_per_prompt.

    Raises VLLMValidationError for another modality, and for anything but a number or {"count": number}.
    """
    limits: dict[Modality, int] = {}
    for name, value in args.limit_mm_per_prompt.items():
        modality: Modality | None = next((each for each in _MODALITIES if each == name), None)
        if modality is None:
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
    limits = media_limits(args)
    return not args.language_model_only and any(limits.get(each, DEFAULT_LIMIT) for each in _MODALITIES)

"""Find what images and sounds cost: their rows, the tower's parameters, the feature cache and the tower's programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.check.report import MediaReport, PictureRows, SoundRows
from jaxllm.execution.encoders.patches import EncoderShape
from jaxllm.execution.mesh import param_bytes
from jaxllm.media.audio.processor import make_audio_processor
from jaxllm.media.items import MediaSettings
from jaxllm.media.processors import ImageProcessor
from jaxllm.media.rules import find_rule
from jaxllm.media.shapes import ItemShape
from jaxllm.models.towers.layout import count_slots
from jaxllm.models.towers.settings import Grid
from jaxllm.resolve.media_settings import media_settings, media_size

if TYPE_CHECKING:
    from jaxllm.check.fitting import Fit
    from jaxllm.execution.programs.compiler import StepCompiler
    from jaxllm.models.towers.tower import Tower

PICTURE = 448
"""The side of the picture, in pixels, with a program in the report."""
SECONDS = 10.0
"""The length of the short sound in the report."""
_LARGE = 4096
"""The side of a picture that every processor resizes to the largest square, or nearly so."""


def report_media(sized: Fit) -> MediaReport | None:
    """Return what images or sounds cost an engine; None for a model that takes text only."""
    towers, config, settings = list(sized.model.towers.values()), sized.config, media_settings(sized.config)
    if not towers or settings is None:
        return None
    num_rows = media_size(config).num_rows
    return MediaReport(
        tower_params=param_bytes(config.mesh, sized.tower_specs),
        cache_rows=num_rows,
        cache=num_rows * towers[0].settings.output_size * sized.model.dtype.itemsize,
        pictures=[
            PictureRows(side=side, rows=find_rule(settings.config).count_rows(shape))
            for side in (PICTURE, _LARGE)
            if (shape := _shape(settings, side)) is not None
        ],
        sounds=_sounds(settings),
    )


def _sounds(settings: MediaSettings) -> list[SoundRows]:
    """Return the rows of a short sound and of the longest, for a model that hears."""
    if settings.audio_placeholder is None:
        return []
    rule = find_rule(settings.config)
    processor = make_audio_processor(settings.audio_processor, rule.clips)
    longest = processor.most_samples / processor.rate
    return [
        SoundRows(seconds=seconds, rows=rule.count_rows(processor.shape(int(seconds * processor.rate))))
        for seconds in sorted({min(SECONDS, longest), longest})
    ]


def encoder_programs(sized: Fit, compiler: StepCompiler) -> dict[str, EncoderShape]:
    """Return the programs of most interest that encode items, by name: a small picture's, and the largest."""
    settings, hearing, sight = media_settings(sized.config), *map(sized.model.find_tower, ("audio", "image"))
    if settings is None:
        return {}
    heard = {"encode a whole clip": compiler.shapes.encoder_shapes[hearing[0]][-1]} if hearing else {}
    return (_seen_programs(settings, compiler.shapes.encoder_shapes[sight[0]], sight[1]) if sight else {}) | heard


def _seen_programs(settings: MediaSettings, shapes: list[EncoderShape], tower: Tower) -> dict[str, EncoderShape]:
    programs = {"encode the largest image": shapes[-1]}
    if (picture := _shape(settings, PICTURE)) is not None:
        num_slots = count_slots(tower.settings, [Grid(*grid) for grid in picture.grids])
        fitting = next((shape for shape in shapes if shape.num_slots >= num_slots), shapes[-1])
        if fitting != shapes[-1]:
            programs = {f"encode a picture of {PICTURE} x {PICTURE}": fitting} | programs
    return programs


def _shape(settings: MediaSettings, side: int) -> ItemShape | None:
    """Return the patches of a square picture; None if the checkpoint names no image processor, or none is loaded."""
    if not settings.image_processor or settings.image_placeholder is None:
        return None
    return ImageProcessor(settings.image_processor, settings.config).shape((side, side), settings.options)

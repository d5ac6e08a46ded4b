"""Find what images cost: their rows, the vision tower's parameters, the feature cache and the tower's programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.check.report import MediaReport, PictureRows
from jaxllm.execution.encoder import EncoderShape
from jaxllm.execution.mesh import param_bytes
from jaxllm.media.processors import ImageProcessor
from jaxllm.media.rules import find_rule
from jaxllm.media.shapes import ItemShape
from jaxllm.models.towers.layout import count_slots
from jaxllm.models.towers.settings import Grid
from jaxllm.resolve.media_settings import count_media_rows, media_settings

if TYPE_CHECKING:
    from jaxllm.check.fitting import Fit
    from jaxllm.execution.compiler import StepCompiler

PICTURE = 448
"""The side of the picture, in pixels, with a program in the report."""
_LARGE = 4096
"""The side of a picture that every processor resizes to the largest square, or nearly so."""


def report_media(sized: Fit) -> MediaReport | None:
    """Return what images cost an engine; None for a model that takes text only."""
    tower, config = sized.model.tower, sized.config
    if tower is None:
        return None
    num_rows = count_media_rows(config)
    return MediaReport(
        tower_params=param_bytes(config.mesh, sized.tower_specs),
        cache_rows=num_rows,
        cache=num_rows * tower.settings.output_size * sized.model.dtype.itemsize,
        pictures=[
            PictureRows(side=side, rows=_count_rows(sized, shape))
            for side in (PICTURE, _LARGE)
            if (shape := _shape(sized, side)) is not None
        ],
    )


def encoder_programs(sized: Fit, compiler: StepCompiler) -> dict[str, EncoderShape]:
    """Return the programs of most interest that encode images, by name: a small picture's, and the largest."""
    shapes, tower = compiler.encoder_shapes, sized.model.tower
    if tower is None:
        return {}
    programs = {"encode the largest image": shapes[-1]}
    if (picture := _shape(sized, PICTURE)) is not None:
        num_slots = count_slots(tower.settings, [Grid(*grid) for grid in picture.grids])
        fitting = next((shape for shape in shapes if shape.num_slots >= num_slots), shapes[-1])
        if fitting != shapes[-1]:
            programs = {f"encode a picture of {PICTURE} x {PICTURE}": fitting} | programs
    return programs


def _shape(sized: Fit, side: int) -> ItemShape | None:
    """Return the patches of a square picture; None if the checkpoint names no image processor."""
    settings = media_settings(sized.config)
    if settings is None or not settings.image_processor:
        return None
    return ImageProcessor(settings.image_processor, settings.config).shape((side, side), settings.options)


def _count_rows(sized: Fit, shape: ItemShape) -> int:
    settings = media_settings(sized.config)
    assert settings is not None
    pieces = find_rule(settings.config).pieces(shape)
    return sum(piece for piece in pieces if isinstance(piece, int))

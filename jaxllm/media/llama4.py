"""Llama 4's image processor in numpy: transformers has it with torch alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, TypedDict

import ml_dtypes
import numpy as np

from jaxllm.media.geometry import Size, Tiles
from jaxllm.media.resize import BILINEAR, resize

if TYPE_CHECKING:
    from PIL.Image import Image


class _Options(TypedDict, total=False):
    max_patches: int
    resize_to_max_canvas: bool


class Llama4Images:
    """Lays an image on the canvas of tiles that distorts it not at all and shrinks it least, with black behind it.

    If the canvas has more than one tile, one more shows the whole image, distorted to a square. Values are rounded to
    bfloat16 after each step, as in training. It is called like an image processor of transformers.
    """

    valid_kwargs = _Options

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Make a processor with the settings of a preprocessor_config.json."""
        self.size: dict[str, int] = settings.get("size") or {"height": 336, "width": 336}
        self.max_patches: int = settings.get("max_patches") or 16
        self.resize_to_max_canvas: bool = settings.get("resize_to_max_canvas") or False
        self._mean, self._std = (
            np.asarray(settings.get(name) or [0.5] * 3, np.float32).reshape(-1, 1, 1)
            for name in ("image_mean", "image_std")
        )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make a processor, under the name that transformers has for this."""
        return cls(settings)

    def __call__(self, image: Image, **options: Any) -> dict[str, Any]:
        """Return the tiles of an image as "pixel_values", float32 [tiles, 3, height, width]."""
        side = options["size"]["height"]
        image_chw = np.asarray(image).transpose(2, 0, 1)
        rows, columns = canvas((image.height, image.width), options)
        height, width = _fit((image.height, image.width), (rows * side, columns * side), options)
        pixels = np.zeros((rows * side, columns * side, 3), np.uint8)
        pixels[:height, :width] = resize(image_chw, (height, width), BILINEAR).transpose(1, 2, 0)
        tiles = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)
        if rows * columns > 1:
            tiles = np.concatenate([tiles, resize(image_chw, (side, side), BILINEAR)[None]])
        scaled = _rounded(tiles.astype(np.float32) * np.float32(1 / 255))
        return {"pixel_values": _rounded(_rounded(scaled - self._mean) / self._std)}


def canvas(size: Size, options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of tiles for an image of a (height, width).

    Of the canvases that the image fits as it is, the one that enlarges it least (with `resize_to_max_canvas`, most);
    if there is none, the one that shrinks it least. Of equal ones the smallest.
    """
    side, most = options["size"]["height"], options["max_patches"]
    canvases = [
        (rows, number // rows) for number in range(most, 0, -1) for rows in range(1, number + 1) if number % rows == 0
    ]
    scales = [
        min(np.float32(rows * side) / np.float32(size[0]), np.float32(columns * side) / np.float32(size[1]))
        for rows, columns in canvases
    ]
    larger = [scale for scale in scales if scale >= 1]
    best = (max if options.get("resize_to_max_canvas") else min)(larger) if larger else max(scales)
    return min((shape for shape, scale in zip(canvases, scales, strict=True) if scale == best), key=math.prod)


def canvas_tiles(_processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """Return the tiles of an image, as the functions of jaxllm.media.geometry do."""
    rows, columns = canvas(size, options)
    side = options["size"]["height"]
    number = rows * columns
    return Tiles(((side, side),) * (number if number == 1 else number + 1), (rows, columns) if number > 1 else (0, 0))


def _fit(size: Size, target: Size, options: Mapping[str, Any]) -> Size:
    """Return the largest size of an image's aspect ratio within a canvas; it grows to one tile at most."""
    if not options.get("resize_to_max_canvas"):
        side = options["size"]["height"]
        target = min(max(size[0], side), target[0]), min(max(size[1], side), target[1])
    by_height, by_width = target[0] / size[0], target[1] / size[1]
    if by_width < by_height:
        return max(1, min(int(size[0] * by_width), target[0])), target[1]
    return target[0], max(1, min(int(size[1] * by_height), target[1]))


def _rounded(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)

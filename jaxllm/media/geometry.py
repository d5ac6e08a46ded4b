"""How large the tiles are that image processors make, computed from the size of an image alone.

Each function takes transformers' image processor, the (height, width) of the image and the processor's options, and
returns `Tiles`. No pixels are made, so that a size over the limit can be refused first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Size = tuple[int, int]
"""Height and width in pixels."""
_MOST_SIDE = 4096
"""The longest side that SmolVLM resizes to."""
_BUDGETS = (70, 140, 280, 560, 1120)
"""The numbers of rows that Gemma 4 was trained with."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one image, and the pixels that are held at once on the way to them."""

    sizes: tuple[Size, ...]
    layout: tuple[int, int] = (0, 0)
    largest: Size = (0, 0)
    """The largest image in between, where it is larger than the tiles."""

    @property
    def num_pixels(self) -> int:
        """Return the pixels of all tiles, or of the largest image in between."""
        return max(sum(height * width for height, width in self.sizes), self.largest[0] * self.largest[1])


def merged_grid(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """Qwen's and GLM's: any size whose sides are multiples of a merged patch, within bounds on the pixels."""
    limits = options["size"]
    bounds = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
    factor = processor.patch_size * processor.merge_size
    resize = _module(processor).smart_resize
    if "num_frames" not in resize.__code__.co_varnames:
        return Tiles((resize(*size, factor=factor, **bounds),))
    frames = processor.temporal_patch_size
    return Tiles((resize(frames, *size, temporal_factor=frames, factor=factor, **bounds),))


def merged_clip(processor: Any, num_frames: int, size: Size, options: Mapping[str, Any]) -> Size:
    """Return the size of a video's frames, within bounds on the pixels of all frames together."""
    from jaxllm.loading.hf import image_processor_class

    bounds = {"min_pixels": options["size"]["shortest_edge"], "max_pixels": options["size"]["longest_edge"]}
    resize = sys.modules[image_processor_class("glm4v", "Glm4vImageProcessorPil").__module__].smart_resize
    factor = processor.patch_size * processor.merge_size
    return resize(num_frames, *size, temporal_factor=processor.temporal_patch_size, factor=factor, **bounds)


def longest_edge(size: Size, options: Mapping[str, Any]) -> tuple[Size, Size]:
    """Return the two sizes that SmolVLM resizes a frame to: within a longest side, then the square of one tile."""
    side, tile = min(options["size"]["longest_edge"], _MOST_SIDE), options["max_image_size"]["longest_edge"]
    height, width = size
    aspect_ratio = width / height
    shorter = int(side / aspect_ratio) if width >= height else int(side * aspect_ratio)
    shorter = max(shorter + shorter % 2, 1)
    return ((shorter, side) if width >= height else (side, shorter)), (tile, tile)


def fixed(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """CLIP's and SigLIP's: one tile, resized to fit it exactly, or resized by the shorter side and cropped."""
    target = options["crop_size"] if processor.do_center_crop else options["size"]
    largest = []
    if hasattr(processor, "pad_to_square") and processor.do_pad and size[0] != size[1]:
        size = (max(size), max(size))
        largest.append(size)
    scale = options["size"].get("shortest_edge", 0) / min(size)
    largest.append((math.ceil(size[0] * scale), math.ceil(size[1] * scale)))
    return Tiles(((target["height"], target["width"]),), largest=max(largest))


def pan_and_scan(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """Gemma 3's: the whole image and, if wished, crops of a long one."""
    tile = options["size"]["height"], options["size"]["width"]
    if not options.get("do_pan_and_scan"):
        return Tiles((tile,))
    scan = {name: value for name, value in options.items() if name.startswith("pan_and_scan_")}
    crops = processor.pan_and_scan(_outline(size), **scan)
    layout = (1, len(crops)) if size[1] >= size[0] else (len(crops), 1)
    return Tiles((tile,) * (1 + len(crops)), layout if crops else (0, 0))


def best_canvas(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """InternVL's: tiles in the arrangement nearest to the image's aspect ratio, then the whole image if there are more.

    The tiles come in rows from the top; `max_patches` bounds their number.
    """
    tile = options["size"]["height"], options["size"]["width"]
    if not options.get("crop_to_patches") or options["max_patches"] <= 1:
        return Tiles((tile,))
    bounds = options["min_patches"], options["max_patches"]
    columns, rows = _module(processor).get_optimal_tiled_canvas(size, tile, *bounds)
    number = columns * rows
    return Tiles((tile,) * (number if number == 1 else number + 1), (rows, columns) if number > 1 else (0, 0))


def split_rows(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """Idefics 3's and SmolVLM's: rows and columns of square tiles, then the whole image in one."""
    side = options["max_image_size"]["longest_edge"]
    names = ("do_image_splitting", "max_image_size", "size")
    number, rows, columns = processor.get_number_of_image_patches(*size, {name: options[name] for name in names})
    return Tiles(((side, side),) * max(1, number), (rows, columns) if number > 1 else (0, 0))


def whole_patches(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """Pixtral's: the image within a longest side, rounded up to whole patches."""
    patch = options["patch_size"]
    edge = options["size"]
    bounds = edge.get("longest_edge") or (edge["height"], edge["width"])
    resize = _module(processor).get_resize_output_image_size
    return Tiles((resize(_outline(size), bounds, (patch["height"], patch["width"]), "channels_first"),))


def any_resolution(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """LLaVA-NeXT's and OneVision's: the whole image, then the tiles of the best of the model's resolutions."""
    side = (options.get("crop_size") or options["size"]).get("height") or options["size"]["shortest_edge"]
    height, width = _module(processor).select_best_resolution(size, processor.image_grid_pinpoints)
    layout = math.ceil(height / side), math.ceil(width / side)
    return Tiles(((side, side),) * (1 + layout[0] * layout[1]), layout, (height, width))


def padded(_: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """LLaVA-OneVision's for one of several images: padded to a square, which becomes one tile."""
    tile = options["size"]["height"], options["size"]["width"]
    return Tiles((tile,), largest=(max(size), max(size)))


def patch_budget(processor: Any, size: Size, options: Mapping[str, Any]) -> Tiles:
    """Gemma 4's: the largest size of the image's aspect ratio within a number of patches."""
    kernel = processor.pooling_kernel_size
    if options["max_soft_tokens"] not in _BUDGETS:
        raise ValueError(f"max_soft_tokens must be one of {_BUDGETS}")
    most = options["max_soft_tokens"] * kernel**2
    return Tiles((_module(processor).get_aspect_ratio_preserving_size(*size, processor.patch_size, most, kernel),))


def _module(processor: Any) -> ModuleType:
    """Return the module of transformers that defines a processor, which holds its sizing function too."""
    return sys.modules[type(processor).__module__]


def _outline(size: Size) -> np.ndarray:
    """Return a stand-in for an image of a size, [3, height, width], that takes one byte."""
    return np.broadcast_to(np.uint8(0), (3, *size))

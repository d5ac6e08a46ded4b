"""Make transformers' Pillow image processors compute what its processors with torch compute, to the last bit.

Both do the same steps: they differ in how pixels are resized, cropped around their centre and normalized.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from jaxllm.media.resize import BILINEAR, resize


@lru_cache(maxsize=32)
def with_torchs_arithmetic(kind: type) -> Any:
    """Return a subclass of one of transformers' Pillow image processors that computes as the one with torch does.

    It takes images in mode RGB alone.
    """
    steps = type("Steps", (_Steps, *kind.__bases__), {})  # after `kind`, which calls them by super()
    bases = (_Gemma4, kind, steps) if hasattr(kind, "aspect_ratio_preserving_resize") else (kind, steps)
    return type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})


@lru_cache(maxsize=4)
def with_merged_patches(kind: type) -> Any:
    """Return a subclass of Gemma 4's image processor whose patches are the squares of patches that it would merge.

    It is that of Gemma 4 12B, which transformers has with torch alone.
    """
    return type(kind.__name__, (_Merged, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Steps:
    """The steps that processors share. Arrays are [channels, h, w], and uint8 until they are normalized."""

    do_rescale: bool
    do_normalize: bool
    rescale_factor: float

    def process_image(self, image: Any, **_options: Any) -> np.ndarray:
        """Return the pixels of an image in mode RGB."""
        return np.asarray(image).transpose(2, 0, 1)

    def resize(self, image: np.ndarray, size: Any, resample: int | None = None, **_options: Any) -> np.ndarray:
        """Return an image of a size, or whose shorter side is the size's shortest edge."""
        height, width = image.shape[1:]
        if size.height and size.width:
            new = size.height, size.width
        elif size.shortest_edge and not size.longest_edge:
            edge = size.shortest_edge
            new = (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)
        else:
            raise ValueError(f"the checkpoint's size must have a height and a width, or a shortest_edge, not {size}")
        return resize(image, new, BILINEAR if resample is None else resample)

    def center_crop(self, image: np.ndarray, size: Any, **_options: Any) -> np.ndarray:
        """Return the middle of an image, with black around it where the image is smaller than the size."""
        missing = [max(0, side - shown) for side, shown in zip((size.height, size.width), image.shape[1:], strict=True)]
        image = np.pad(image, [(0, 0), *((most // 2, most - most // 2) for most in missing)])
        top, left = (image.shape[1] - size.height) // 2, (image.shape[2] - size.width) // 2
        return image[:, top : top + size.height, left : left + size.width]

    def rescale(self, image: np.ndarray, scale: float, **_options: Any) -> np.ndarray:
        """Return an image with values times a scale, or as it is where `normalize` does that too."""
        return image if self.do_normalize else image * np.float32(scale)

    def normalize(self, image: np.ndarray, mean: Any, std: Any, **_options: Any) -> np.ndarray:
        """Return an image, rescaled if the processor rescales, less the mean and over the deviation, as float32."""
        unit = np.float32(1 / self.rescale_factor if self.do_rescale else 1)
        mean_c11, std_c11 = (np.asarray(values, np.float32).reshape(-1, 1, 1) * unit for values in (mean, std))
        return (image - mean_c11) / std_c11


class _Gemma4:
    """Gemma 4's resizing, which does not call `resize`."""

    def aspect_ratio_preserving_resize(
        self, image: np.ndarray, patch_size: int, max_patches: int, pooling_kernel_size: int, resample: int
    ) -> np.ndarray:
        """Return an image of the largest size of its aspect ratio within a number of patches."""
        size_of = sys.modules[type(self).__module__].get_aspect_ratio_preserving_size
        return resize(image, size_of(*image.shape[1:], patch_size, max_patches, pooling_kernel_size), resample)


class _Merged:
    """The patches of Gemma 4 12B."""

    patch_size: int
    pooling_kernel_size: int

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Any:
        """Return a processor with the settings of a preprocessor_config.json."""
        side = settings.get("patch_size", cls.patch_size) * settings.get("pooling_kernel_size", cls.pooling_kernel_size)
        make: Any = super()
        return make.from_dict({**settings, "patch_size": side, "pooling_kernel_size": 1})

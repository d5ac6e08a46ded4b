"""Tell apart the Python objects that an image or a video may be."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from jaxllm.media.items import MediaSource, Modality

NUM_AXES: Mapping[Modality, tuple[int, ...]] = {"image": (2, 3), "video": (4,)}
"""The numbers of axes that one item's array may have: an image may lack channels, a video has frames before them."""
FORMS: Mapping[Modality, str] = {
    "image": "a PIL image, an array [height, width, channels], or the bytes of a file",
    "video": "an array [frames, height, width, channels], a list of PIL images, or the bytes of a file",
}


def read_source(value: Any, modality: Modality) -> MediaSource:
    """Return an object as the source of one item; None if it is none."""
    if is_image(value):
        return value if modality == "image" else None
    if is_array(value):
        import numpy as np  # not needed for text

        return np.asarray(value) if value.ndim in NUM_AXES[modality] else None
    if isinstance(value, bytes):
        return value or None
    return tuple(value) if modality == "video" and is_frames(value) else None


def is_image(value: Any) -> TypeGuard[Image]:
    """Return whether a value is a PIL image, without loading PIL."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def is_array(value: Any) -> TypeGuard[np.ndarray]:
    """Return whether a value is a NumPy array, or converts itself to one."""
    return hasattr(value, "__array__") and hasattr(value, "ndim")


def is_frames(value: Any) -> bool:
    """Return whether a value is a list of at least one PIL image."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_image, value))

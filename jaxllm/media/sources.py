"""Tell apart the Python objects that an image, a video or a sound may be."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from jaxllm.media.items import Embeds, MediaSource, Modality

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

NUM_AXES: Mapping[Modality, tuple[int, ...]] = {"image": (2, 3), "video": (4,), "audio": (1,)}
"""The numbers of axes that one item's array may have: an image may lack channels, a video has frames before them. A
sound has no channels unless its samples a second come with it."""
_EMBEDS_AXES = 2
"""The number of axes of one item's embeddings."""
FORMS: Mapping[Modality, str] = {
    "image": "a PIL image, an array [height, width, channels], or the bytes of a file",
    "video": "an array [frames, height, width, channels], a list of PIL images, or the bytes of a file",
    "audio": "an array of floats [n], a pair of one or of [channels, n] and its rate, or the bytes of a file",
}


def read_source(value: Any, modality: Modality) -> MediaSource:
    """Return an object as the source of one item; None if it is none."""
    if (embeds := read_embeds_source(value, modality)) is not None:
        return embeds
    if is_sound(value):
        return tuple(value) if modality == "audio" else None
    if is_image(value):
        return value if modality == "image" else None
    if is_array(value):
        import numpy as np  # not needed for text

        return np.asarray(value) if value.ndim in NUM_AXES[modality] else None
    if isinstance(value, bytes):
        return value or None
    return tuple(value) if modality == "video" and is_frames(value) else None


def read_embeds_source(value: Any, modality: Modality) -> Embeds | None:
    """Return computed embeddings: an array of floats [r, w], or a dict in vLLM's form, which may be of several items;
    None if a value is neither, and for sounds, whose arrays of floats are samples.
    """
    if modality == "audio":
        return None
    if isinstance(value, Embeds):
        return value
    name = f"{modality}_embeds"
    if isinstance(value, Mapping) and name in value:
        return Embeds(value[name], {key: detail for key, detail in value.items() if key != name})
    return Embeds(value, {}) if is_float_array(value) and value.ndim == _EMBEDS_AXES else None


def is_float_array(value: Any) -> TypeGuard[np.ndarray]:
    """Return whether a value is an array of floats of any library."""
    return is_array(value) and "float" in str(getattr(value, "dtype", ""))


def is_image(value: Any) -> TypeGuard[Image]:
    """Return whether a value is a PIL image, without loading PIL."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def is_array(value: Any) -> TypeGuard[np.ndarray]:
    """Return whether a value is a NumPy array, or converts itself to one."""
    return hasattr(value, "__array__") and hasattr(value, "ndim")


def is_sound(value: Any) -> bool:
    """Return whether a value is a pair of an array and a number: a sound and its samples a second."""
    return isinstance(value, tuple) and len(value) == 2 and is_array(value[0]) and not hasattr(value[1], "__len__")


def is_frames(value: Any) -> bool:
    """Return whether a value is a list of at least one PIL image."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_image, value))

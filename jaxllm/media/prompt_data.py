"""Read the media that a prompt brings as Python objects, in vLLM's fields multi_modal_data and multi_modal_uuids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import MediaPart, Modality, read_uuid
from jaxllm.media.sources import (
    FORMS,
    NUM_AXES,
    is_array,
    is_float_array,
    is_frames,
    is_image,
    is_sound,
    read_embeds_source,
    read_source,
)
from jaxllm.params.checks import has_length, shown

_DATA, _UUIDS = "multi_modal_data", "multi_modal_uuids"
_MODALITIES: Mapping[Any, Modality] = {"image": "image", "video": "video", "audio": "audio"}


def read_prompt_data(data: Any, uuids: Any, label: str) -> tuple[MediaPart, ...]:
    """Return the records of a prompt's media, in the order of `data`.

    Raises VLLMValidationError, which names the field and in its message the item, as in
    "prompts[1]['multi_modal_data']['image'][0]".
    """
    names = {modality: value for modality, value in _checked(uuids, _UUIDS, label).items() if value is not None}
    parts: list[MediaPart] = []
    for modality, value in _checked(data, _DATA, label).items():
        prefix = f"{label}[{_DATA!r}][{modality!r}]"
        # None stands for as many items as there are names, for no item without any.
        items = [None] * _count_names(names.get(modality)) if value is None else list(_items(value, modality, prefix))
        item_names = _names(names.pop(modality, None), len(items), f"{label}[{_UUIDS!r}][{modality!r}]")
        parts += [
            _part(item, name, modality, f"{prefix}[{i}]")
            for i, (item, name) in enumerate(zip(items, item_names, strict=True))
        ]
    for modality, value in names.items():
        _names(value, 0, f"{label}[{_UUIDS!r}][{modality!r}]")
    return tuple(parts)


def _checked(value: Any, field: str, label: str) -> dict[Modality, Any]:
    """Return a field's values by modality, None for missing ones."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        message = f"{label}: {field!r} must be a dict with the keys {', '.join(_MODALITIES)}, got {shown(value)}."
        raise VLLMValidationError(message, parameter=field, value=shown(value))
    for key, items in value.items():
        if key not in _MODALITIES and items is not None:
            message = f"{label}[{field!r}]: {key!r} is not supported: the keys are {', '.join(_MODALITIES)}."
            raise VLLMValidationError(message, parameter=field, value=key)
    return {_MODALITIES[key]: items for key, items in value.items() if key in _MODALITIES}


def _items(value: Any, modality: Modality, label: str) -> Iterator[Any]:
    """Yield the items of a modality: one, several in a list, or several as the first axis of an array.

    A dict of computed embeddings may have several.
    """
    if isinstance(value, Mapping) and (embeds := read_embeds_source(value, modality)) is not None:
        from jaxllm.media.embeds.checked import split_embeds  # which loads numpy

        yield from split_embeds(embeds, modality, label)
        return
    is_one = is_image(value) or _is_with_metadata(value) or is_sound(value)
    is_one = is_one or (modality == "video" and is_frames(value))
    if is_array(value):
        is_one = value.ndim != NUM_AXES[modality][-1] + 1 and not (is_float_array(value) and value.ndim == 3)
    if is_one or not has_length(value) or isinstance(value, (str, bytes, Mapping)):
        yield value
    else:
        yield from value


def _is_with_metadata(value: Any) -> bool:
    """Return whether a value is a video's array with its metadata."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def _part(item: Any, uuid: str | None, modality: Modality, label: str) -> MediaPart:
    metadata = None
    if modality == "video" and _is_with_metadata(item):
        item, metadata = item
    source = read_source(item, modality)
    if source is None and (item is not None or uuid is None):
        message = f"{label}: must be {FORMS[modality]}, got {_described(item)}."
        if item is None:
            message += " None needs its uuid in 'multi_modal_uuids'."
        raise VLLMValidationError(message, parameter=_DATA, value=_described(item))
    return MediaPart(modality, source, uuid, label, metadata)


def _described(item: Any) -> str:
    return f"an array of shape {tuple(item.shape)}" if is_array(item) else f"{shown(item)} ({type(item).__name__})"


def _count_names(value: Any) -> int:
    """Return the number of names that a modality has, 0 for what `_names` refuses."""
    return 1 if isinstance(value, str) else len(value) if isinstance(value, Sequence) else 0


def _names(value: Any, count: int, label: str) -> list[str | None]:
    """Return the user's name of each item, or None."""
    if value is None:
        return [None] * count
    names: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or len(names) != count:
        message = f"{label}: must have one entry, a text or None, for each of the {count} items, got {shown(value)}."
        raise VLLMValidationError(message, parameter=_UUIDS, value=shown(value))
    return [name if name is None else read_uuid(name, f"{label}[{i}]", _UUIDS) for i, name in enumerate(names)]

"""Read the media among a message's content parts, in OpenAI's form and in that of HF's chat templates."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxllm.media.items import Embeds, MediaPart, MediaSource, Modality, field_of, read_uuid, refusal
from jaxllm.media.sources import FORMS, read_embeds_source, read_source
from jaxllm.params.checks import is_unicode

_KINDS: Mapping[str, tuple[Modality, tuple[str, ...]]] = {
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url",)),
    "image_pil": ("image", ("image_pil",)),
    "image": ("image", ("image", "url", "path")),
    "video_url": ("video", ("video_url",)),
    "video": ("video", ("video", "url", "path")),
    "audio_url": ("audio", ("audio_url",)),
    "input_audio": ("audio", ("input_audio",)),
    "audio": ("audio", ("audio", "url", "path")),
    "image_embeds": ("image", ("image_embeds",)),
    "video_embeds": ("video", ("video_embeds",)),
}
"""The modality of each type of part, and the keys that its source may be under."""
_REFUSED: Mapping[str, str] = {
    "audio_embeds": "embeddings of sounds are not taken; send the sound",
    "prompt_embeds": "embeddings of text are not taken; send the text",
    **dict.fromkeys(("input_file", "file"), "files are not read; send their text or pictures of their pages"),
}
"""The types of parts that are refused by name, with the reason."""
_URLS = ("image_url", "video_url", "audio_url", "input_audio", "url")
"""The keys under which a text is a URL with any scheme."""
_MAX_PATH = 4096
"""The maximum length of a path in characters; Linux opens no longer one."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,63}:")


def kind_of(part: Mapping[str, Any]) -> Any:
    """Return the type of a content part. Media may lack 'type': their key names it then."""
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in ("text", *_KINDS, *_REFUSED) if name in part), "text")
    return kind


def read_media_part(part: Mapping[str, Any], label: str, kinds: Collection[str] = _KINDS) -> MediaPart:
    """Return the record of a content part, of one of the types `kinds`, whose URL or path is unchecked; 'detail' has no
    effect, as in vLLM.

    Raises VLLMValidationError, naming the position, for a part of another type, or that has no source and no uuid.
    """
    kind = kind_of(part)
    if kind not in kinds:
        reason = _REFUSED.get(kind, f"a part is a text, or one of {', '.join(kinds)}")
        raise refusal(label, f"parts of type {kind!r} are not supported: {reason}", kind)
    if part.get("file_id") is not None:
        raise refusal(label, "'file_id' is not supported: no files are kept; use 'image_url'", part["file_id"])
    modality, keys = _KINDS[kind]
    key = next((key for key in keys if part.get(key) is not None), keys[0])
    value, uuid = part.get(key), part.get("uuid")
    if key == "input_audio":
        value = _data_url(value)
    elif isinstance(value, Mapping) and not key.endswith("embeds"):
        value = value.get("url")
    if uuid is not None:
        uuid = read_uuid(uuid, f"{label}: 'uuid'", field_of(label))
    source = _read(value, key, modality, label)
    is_empty = value is None or (isinstance(value, str) and not value)
    if source is None and (uuid is None or not is_empty):
        raise refusal(label, f"needs {key!r}: {_forms(key, modality)}", value)
    return MediaPart(modality, source, uuid, label)


def _data_url(sound: Any) -> str | None:
    """Return the URL that stands for a sound in OpenAI's form. Its 'format' has no effect: the file tells it."""
    data = sound.get("data") if isinstance(sound, Mapping) else None
    return f"data:audio;base64,{data}" if isinstance(data, str) and data else None


def _read(value: Any, key: str, modality: Modality, label: str) -> MediaSource:
    """Return the source that a part has under a key; None if there is none. A path becomes a URL, so that the rules
    for local files apply to it. Raises VLLMValidationError for a path that is too long.
    """
    if key.endswith("embeds"):
        is_base64 = isinstance(value, str) and value
        return Embeds(value, {}) if is_base64 else read_embeds_source(value, modality)
    if not isinstance(value, str):
        return None if key in _URLS else read_source(value, modality)
    if key == "image_pil" or not value or not is_unicode(value):
        return None
    if key in _URLS or _SCHEME.match(value):
        return value
    if len(value) > _MAX_PATH:
        raise refusal(label, f"{key!r} must have at most {_MAX_PATH} characters as a path, got {len(value)}", value)
    return Path(value).absolute().as_uri()


def _forms(key: str, modality: Modality) -> str:
    """Return in words what a part may have under a key."""
    if key == "input_audio":
        return "a dict with the sound's file as 'data', in base64, and its 'format'"
    if key in _URLS:
        return "a URL"
    if key.endswith("embeds"):
        return f"an array in base64, or a dict with {key!r} and what belongs to it"
    return "a PIL image" if key == "image_pil" else f"a URL, a path, {FORMS[modality]}"

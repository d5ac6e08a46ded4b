"""The media of a prompt as plain records, before anything is fetched or decoded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_options, check_str, shown

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

type Modality = Literal["image", "video", "audio"]

type MediaSource = str | bytes | Image | np.ndarray | tuple[Image, ...] | tuple[np.ndarray, Any] | Embeds | None

DEFAULT_LIMIT = 999
"""The maximum number of items of a modality in a prompt, unless limit_mm_per_prompt sets another."""

_MAX_UUID = 1024
_NEVER = "(?!)"
"""A pattern that matches nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """Computed embeddings in place of an item, unchecked."""

    rows: Any
    """The rows that a tower would make: an array [r, w], or one in base64."""
    details: Mapping[str, Any]
    """What the user tells besides, by vLLM's names: "image_grid_thw" and others."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaPart:
    """A reference to an image, a video or a sound in a prompt."""

    modality: Modality
    source: MediaSource
    """What the item is made from:

    - a URL with any scheme (also "data:" and "file:"), which is unchecked
    - the bytes of a file
    - a PIL image
    - an array: [height, width, channels] or [height, width] of an image, [frames, height, width, channels] of a video,
      [n] of a sound
    - a sound's array and its samples a second
    - the frames of a video as PIL images
    - computed embeddings
    - None: the item is known by its uuid
    """
    uuid: str | None
    """The user's name of the item, which takes the place of a hash of its content."""
    label: str
    """The position in the request, such as "messages[2]['content'][1]", for errors."""
    metadata: Mapping[str, Any] | None = None
    """What the user tells of a video's array: "fps", "total_num_frames", "frames_indices" and others."""


class ClipInput(msgspec.Struct, frozen=True, kw_only=True):
    """What the encoder of an encoder-decoder takes."""

    num_mels: int
    """The bands of a spectrogram."""
    num_frames: int
    """The frames that it makes of a clip, each of two columns of the spectrogram."""
    start_token_id: int
    """The token that each decoder's prompt begins with."""


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts refer to media, and how many they may have, for a model that takes some."""

    image_placeholder: str | None = None
    """The text that stands for an image in a prompt; None if the model takes no images."""
    video_placeholder: str | None = None
    """The text that stands for a video in a prompt; None if the model takes no videos."""
    audio_placeholder: str | None = None
    """The text that stands for a sound in a prompt; None if the model takes no sounds."""
    reserved: tuple[str, ...] = ()
    """Other texts that become media in a prompt, such as the token of one row of an image."""
    limits: dict[Modality, int] = {}
    """The maximum number of items of a modality in a prompt; DEFAULT_LIMIT for one that is missing."""
    max_model_len: int = INT32_MAX
    """The most tokens of a prompt, those of its media among them."""
    interleave_mm_strings: bool = False
    """Whether placeholders stay between the texts of a message, and are not put before them, where a chat template
    reads texts alone.
    """

    clips: ClipInput | None = None
    """What the encoder takes, in an encoder-decoder; it has no other settings then, but what URLs may name."""
    text_only: str = ""
    """Why the model takes no media, if it could take some; it has no other settings then."""

    enable_mm_embeds: bool = False
    """Whether items may be computed embeddings."""
    row_size: int = 0
    """The numbers of a row of embeddings."""
    most_rows: int = INT32_MAX
    """The most rows of an item."""
    config: dict[str, Any] = {}
    """The model's config.json without its text part."""
    image_processor: dict[str, Any] = {}
    """The settings of HF's image processor."""
    video_processor: dict[str, Any] = {}
    """The settings of HF's video processor."""
    audio_processor: dict[str, Any] = {}
    """The settings of HF's feature extractor for sounds."""
    options: dict[str, Any] = {}
    """Options of these processors for all prompts, without those that say which frames are taken."""
    sampling: dict[str, Any] = {}
    """Which frames of a video are taken, as `Sampling` has them."""
    cache_gb: float = 4.0
    """The GiB of processed items that are kept."""
    allowed_local_media_path: str = ""
    """The folder whose files prompts may name; "" for none."""
    allowed_media_domains: list[str] | None = None
    """The hosts that items may be fetched from; None for all public ones."""
    rope_merge: int | None = None
    """The side of the squares of patches that one position of multimodal RoPE stands for; None in a model without it.
    """
    steps_per_second: float | None = None
    """The positions in time that a second of a video takes; None if each step in time takes one."""

    def placeholder(self, modality: Modality) -> str | None:
        """Return the text that stands for an item; None if the model takes none of its modality."""
        by_modality = {
            "image": self.image_placeholder,
            "video": self.video_placeholder,
            "audio": self.audio_placeholder,
        }
        return by_modality[modality]

    def limit(self, modality: Modality) -> int:
        """Return the maximum number of items of a modality in a prompt; 0 if the model takes none."""
        return 0 if self.placeholder(modality) is None else self.limits.get(modality, DEFAULT_LIMIT)

    @property
    def _placeholders(self) -> list[str]:
        return [mark for mark in (self.image_placeholder, self.video_placeholder, self.audio_placeholder) if mark]

    @property
    def takes_images(self) -> bool:
        """Return whether a prompt may have an image."""
        return self.limit("image") > 0

    def check_text(self, text: str, label: str) -> None:
        """Raise VLLMValidationError for a message's text that would be read as media: a tokenizer cannot escape it."""
        for mark in (*self._placeholders, *self.reserved):
            if mark in text:
                raise refusal(label, f"must not have {mark!r} in a text: send the item as a part of the message", mark)

    def check_rendered(self, text: str, parts: Iterable[MediaPart], label: str) -> None:
        """Raise VLLMValidationError for a rendered conversation that has not one placeholder for each item and nothing
        else that would be read as media: names of roles, tools and variables are texts that `check_text` does not see.
        """
        marks = self._placeholders
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or _NEVER)
        counts, expected = Counter(pattern.findall(text)), Counter(self.placeholder(part.modality) for part in parts)
        between = pattern.split(text)
        for mark in (*marks, *self.reserved):
            count = counts[mark] + sum(piece.count(mark) for piece in between)
            if count != expected[mark]:
                raise VLLMValidationError(
                    f"{label}: the rendered chat has {count} of {mark!r} for {expected[mark]} items: no role, text, "
                    "call, tool or template variable may have it, and the template has to show each item once.",
                    parameter="messages",
                    value=mark,
                )

    def check_counts(self, parts: Iterable[MediaPart], parameter: str) -> None:
        """Raise VLLMValidationError, which names `parameter`, for a prompt with more items than are allowed, and for
        computed embeddings unless they are allowed.
        """
        counts = Counter[Modality]()
        for part in parts:
            if isinstance(part.source, Embeds) and not self.enable_mm_embeds:
                message = f"{part.label}: computed embeddings, and arrays of floats, which count as such, need "
                message += "enable_mm_embeds=True (--enable-mm-embeds); pixels are uint8."
                raise VLLMValidationError(message, parameter=parameter)
            limit = self.limit(part.modality)
            counts[part.modality] += 1
            if counts[part.modality] > limit:
                message = f"{part.label}: At most {limit} {part.modality}(s) may be provided in one prompt."
                if self.placeholder(part.modality) is not None:
                    message += " Set `--limit-mm-per-prompt` to increase this limit."
                raise VLLMValidationError(message, parameter=parameter, value=counts[part.modality])


def video_sampling(media_io_kwargs: Any) -> dict[str, Any]:
    """Return which frames of videos are taken, from `media_io_kwargs`, whose values `Sampling` checks.

    Raises VLLMValidationError for anything but a dict of options by modality, and for other modalities than videos.
    """
    by_modality = check_options("media_io_kwargs", media_io_kwargs)
    for modality, options in by_modality.items():
        if modality != "video" and options:
            message = f"media_io_kwargs has no {shown(modality)}: only videos have options."
            raise VLLMValidationError(message, parameter="media_io_kwargs", value=shown(modality))
    video = by_modality.get("video")
    if video is not None and not isinstance(video, Mapping):
        message = f"media_io_kwargs['video'] must be a dict, got {shown(video)}."
        raise VLLMValidationError(message, parameter="media_io_kwargs", value=shown(video))
    return dict(video or {})


def split_options(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return mm_processor_kwargs without which frames of videos are taken, and `sampling` with it.

    HF's video processors have both. Raises VLLMValidationError for what stands in both places.
    """
    of_frames = {name: options[name] for name in ("fps", "num_frames") if name in options}
    if of_frames and not sampling.keys().isdisjoint(("fps", "num_frames")):
        names = " and ".join(of_frames)
        message = (
            f"mm_processor_kwargs has {names}, and media_io_kwargs says which frames are taken too: leave one out."
        )
        raise VLLMValidationError(message, parameter="mm_processor_kwargs", value=names)
    return {name: value for name, value in options.items() if name not in of_frames}, {**sampling, **of_frames}


def read_uuid(uuid: Any, name: str, parameter: str) -> str:
    """Return a user's name of an item as text. Raises VLLMValidationError, naming `parameter`, for an unusable one."""
    return check_str(name, str(uuid) if isinstance(uuid, int) else uuid, _MAX_UUID, parameter=parameter)


def refusal(label: str, message: str, value: Any) -> VLLMValidationError:
    """Return the error for a part of a request; it names the field that the part is in."""
    return VLLMValidationError(f"{label}: {message}.", parameter=field_of(label), value=shown(value))


def field_of(label: str) -> str:
    """Return the field that a position in a request begins with."""
    [field] = re.findall(r"^\w*", label)
    return field

"""Parse the forms that a prompt may have, and refuse unsupported ones by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import MediaPart, MediaSettings
from jaxllm.media.prompt_data import read_prompt_data
from jaxllm.params.checks import INT32_MAX, check_options, check_str, has_length, shown
from jaxllm.text.encoder_prompts import split_prompt

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "text_pair", "token_type_ids", "prompt_embeds")
_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_TEXT_ONLY = "the model takes text only"


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt: text to tokenize, or token ids with their text if known."""

    text: str | None
    token_ids: Sequence[Any] | None = None
    salt: str | None = None
    is_templated: bool = False
    """Whether the text already has its special tokens."""
    pair: str | None = None
    """The second text of a pair; `text` is the first."""
    type_ids: Sequence[Any] | None = None
    """For each token id, 0 in the first text of a pair and 1 in the second."""
    media: tuple[MediaPart, ...] = ()
    """The prompt's images and videos in order of appearance, which are not fetched."""
    processor_options: Mapping[str, Any] | None = None
    """The prompt's mm_processor_kwargs."""
    sound: Any = None
    """What the encoder of an encoder-decoder is given, unchecked."""
    embeds: Any = None
    """The embeddings of the prompt's tokens, unchecked; None for a prompt of text or ids."""
    sampling: Mapping[str, Any] | None = None
    """Which frames of videos are taken, as `Sampling.merged` reads it; None: as the engine's arguments say."""


def is_single_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is one prompt and not a batch: text, a dict, or a list of token ids."""
    if isinstance(prompts, (str, bytes, Mapping, ParsedPrompt)):
        return True
    if not _is_id_list(prompts):
        message = f"prompts must be one prompt or a list of them, got {shown(prompts)} ({type(prompts).__name__})."
        raise VLLMValidationError(message, parameter="prompts", value=prompts)
    return len(prompts) > 0 and not isinstance(prompts[0], ParsedPrompt) and not hasattr(prompts[0], "__len__")


def parse_prompt(prompt: Any, label: str, media: MediaSettings | None = None) -> ParsedPrompt:
    """Parse a prompt in any form, with the media that `media` allows; none if it is None."""
    if isinstance(prompt, ParsedPrompt):
        _check_salt(prompt.salt, label)
        check_media_options({"mm_processor_kwargs": prompt.processor_options}, media, f"{label}: ")
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(prompt)
    if isinstance(prompt, Mapping):
        if media is None or media.clips is None:
            return _parse_mapping(prompt, label, media)
        decoder, sound = split_prompt(prompt, label)
        return dataclasses.replace(_parse_mapping(decoder, label, None), sound=sound)
    if _is_id_list(prompt):
        return ParsedPrompt(None, prompt)
    message = f"{label}: a prompt is a str, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
    raise VLLMValidationError(
        f"{message}; got {shown(prompt)} ({type(prompt).__name__}).", parameter="prompt", value=prompt
    )


def begin_with(before: str, prompt: Any) -> Any:
    """Return a prompt with another text in front; a prompt without text is unchanged."""
    if isinstance(prompt, str):
        return before + prompt
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str) and prompt.get("prompt_token_ids") is None:
        return {**prompt, "prompt": before + prompt["prompt"]}
    return prompt


def with_processor_options(options: Mapping[str, Any] | None, prompt: Any) -> Any:
    """Return a prompt with mm_processor_kwargs of a call; the prompt's own go before them."""
    if not options:
        return prompt
    if isinstance(prompt, ParsedPrompt):
        return dataclasses.replace(prompt, processor_options={**options, **(prompt.processor_options or {})})
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif not isinstance(prompt, Mapping):
        prompt = {"prompt_token_ids": prompt}
    of_prompt = check_options("mm_processor_kwargs", prompt.get("mm_processor_kwargs"))
    return {**prompt, "mm_processor_kwargs": {**options, **of_prompt}}


def text_only_reason(media: MediaSettings | None) -> str:
    """Return the reason why media are refused for a model that takes none; "" for one that takes some."""
    if media is None:
        return _TEXT_ONLY
    return f"{_TEXT_ONLY}: {media.text_only}" if media.text_only else ""


def check_media_options(options: Mapping[str, Any], media: MediaSettings | None, label: str = "") -> None:
    """Raise VLLMValidationError for options of media, by their names, that have a value where the model takes none."""
    reason = text_only_reason(media)
    for name, value in options.items():
        if reason and value:
            message = f"{label}{name!r} is not supported: {reason}."
            raise VLLMValidationError(message, parameter=name, value=shown(value))


def _parse_mapping(prompt: Mapping[str, Any], label: str, media: MediaSettings | None) -> ParsedPrompt:
    fields = {name: value for name, value in prompt.items() if value is not None}
    known = _KEYS if text_only_reason(media) else _KEYS + _MEDIA_KEYS
    check_media_options({name: fields.get(name) for name in _MEDIA_KEYS}, media, f"{label}: ")
    for name, value in fields.items():
        if name not in known and name not in _MEDIA_KEYS:
            message = f"{label}: {name!r} is not supported; a prompt takes {', '.join(known)}."
            raise VLLMValidationError(message, parameter=str(name), value=value)
    text, token_ids, salt, pair, type_ids, embeds = (fields.get(name) for name in _KEYS)
    if embeds is not None:
        return _parse_embeds(fields, label)
    if text is None and token_ids is None:
        raise VLLMValidationError(f"{label}: needs 'prompt' or 'prompt_token_ids'.", parameter="prompt", value=prompt)
    if text is not None and not isinstance(text, str):
        raise VLLMValidationError(
            f"{label}: 'prompt' must be a str, got {shown(text)}.", parameter="prompt", value=text
        )
    if token_ids is not None and not _is_id_list(token_ids):
        message = f"{label}: 'prompt_token_ids' must be a list of integers, got {shown(token_ids)}."
        raise VLLMValidationError(message, parameter="prompt_token_ids", value=token_ids)
    _check_pair(text, token_ids, pair, type_ids, label)
    _check_salt(salt, label)
    parsed = ParsedPrompt(text, token_ids, salt, pair=pair, type_ids=type_ids)
    return parsed if media is None else _with_media(parsed, fields, media, label)


def _parse_embeds(fields: Mapping[str, Any], label: str) -> ParsedPrompt:
    """Parse a prompt of embeddings, which may have a text that is shown, and a salt."""
    for name in fields:
        if name not in ("prompt_embeds", "prompt", "cache_salt"):
            message = f"{label}: 'prompt_embeds' are the whole prompt: leave {name!r} out."
            raise VLLMValidationError(message, parameter=name)
    text, salt = fields.get("prompt"), fields.get("cache_salt")
    if text is not None and not isinstance(text, str):
        message = f"{label}: 'prompt' must be a str, got {shown(text)}."
        raise VLLMValidationError(message, parameter="prompt", value=text)
    _check_salt(salt, label)
    return ParsedPrompt(text, salt=salt, embeds=fields["prompt_embeds"])


def _with_media(prompt: ParsedPrompt, fields: Mapping[str, Any], media: MediaSettings, label: str) -> ParsedPrompt:
    """Return a prompt with the media among its fields."""
    data, uuids, options = map(fields.get, _MEDIA_KEYS)
    parts = read_prompt_data(data, uuids, label)
    if parts and prompt.pair is not None:
        message = f"{label}: 'text_pair' and 'multi_modal_data' exclude each other."
        raise VLLMValidationError(message, parameter="multi_modal_data")
    media.check_counts(parts, "multi_modal_data")
    options = check_options("mm_processor_kwargs", options) or None
    if options and not parts:
        message = f"{label}: 'mm_processor_kwargs' needs 'multi_modal_data': without images and videos, leave it out."
        raise VLLMValidationError(message, parameter="mm_processor_kwargs", value=shown(options))
    return dataclasses.replace(prompt, media=parts, processor_options=options)


def _check_pair(text: Any, token_ids: Any, pair: Any, type_ids: Any, label: str) -> None:
    if pair is not None and (not isinstance(pair, str) or text is None or token_ids is not None):
        message = f"{label}: 'text_pair' is a str that goes with 'prompt' as text, got {shown(pair)}."
        raise VLLMValidationError(message, parameter="text_pair", value=pair)
    if type_ids is not None and (token_ids is None or not _is_id_list(type_ids) or len(type_ids) != len(token_ids)):
        message = f"{label}: 'token_type_ids' has a number for each of 'prompt_token_ids', got {shown(type_ids)}."
        raise VLLMValidationError(message, parameter="token_type_ids", value=type_ids)


def _check_salt(salt: Any, label: str) -> None:
    if salt is not None:
        check_str(f"{label}: 'cache_salt'", salt, INT32_MAX, parameter="cache_salt")


def _is_id_list(value: Any) -> bool:
    """Return whether `value` can be token ids: a sequence other than text, or a NumPy array with an axis."""
    is_sequence = has_length(value) and hasattr(value, "__getitem__")
    return is_sequence and not isinstance(value, (str, bytes, Mapping))

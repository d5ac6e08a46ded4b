"""Parse the prompts of an encoder-decoder: sound to attend to, and a decoder's prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown

_ENCODER, _DECODER, _DATA = "encoder_prompt", "decoder_prompt", "multi_modal_data"
_REFUSED = ("multi_modal_uuids", "mm_processor_kwargs")


class _SplitPrompt(NamedTuple):
    """The two parts of a prompt, not checked further."""

    decoder: Mapping[str, Any]
    """The decoder's prompt without media: its text or token ids, and other fields."""
    sound: Any
    """What the encoder is given; None if there is nothing."""


def split_prompt(prompt: Mapping[str, Any], label: str) -> _SplitPrompt:
    """Return the parts of a prompt in one of vLLM's forms.

    They are {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": sound}}, "decoder_prompt": PROMPT}, and
    {"prompt": PROMPT, "multi_modal_data": {"audio": sound}}. Raises VLLMValidationError for others.
    """
    for part in (prompt, prompt.get(_ENCODER), prompt.get(_DECODER)):
        for name in _REFUSED:
            if isinstance(part, Mapping) and part.get(name):
                message = f"{label}: {name!r} is not supported for an encoder-decoder."
                raise VLLMValidationError(message, parameter=name, value=shown(part[name]))
    if _ENCODER not in prompt and _DECODER not in prompt:
        rest = {name: value for name, value in prompt.items() if name != _DATA}
        return _SplitPrompt({"prompt": "", **rest} if "prompt_token_ids" not in rest else rest, _sound(prompt, label))
    if others := sorted(map(str, prompt.keys() - {_ENCODER, _DECODER})):
        message = f"{label}: {others[0]!r} does not go with 'encoder_prompt': put it into one of the two prompts."
        raise VLLMValidationError(message, parameter=others[0])
    encoder, decoder = prompt.get(_ENCODER), prompt.get(_DECODER)
    if isinstance(encoder, str):
        encoder = {"prompt": encoder}
    if not isinstance(encoder, Mapping):
        message = f"{label}: {_ENCODER!r} must be a dict with {_DATA!r}, got {shown(encoder)}."
        raise VLLMValidationError(message, parameter=_ENCODER, value=shown(encoder))
    if encoder.get("prompt") or encoder.get("prompt_token_ids"):
        message = f"{label}: {_ENCODER!r} has a text, and the encoder takes sound alone: leave it empty."
        raise VLLMValidationError(message, parameter=_ENCODER)
    if isinstance(decoder, Mapping):
        if decoder.get(_DATA):
            message = f"{label}: {_DECODER!r} has {_DATA!r}, which belong to {_ENCODER!r}."
            raise VLLMValidationError(message, parameter=_DECODER)
    elif decoder is None or isinstance(decoder, str):
        decoder = {"prompt": decoder or ""}
    else:
        decoder = {"prompt_token_ids": decoder}
    return _SplitPrompt(decoder, _sound(encoder, f"{label}[{_ENCODER!r}]"))


def _sound(prompt: Mapping[str, Any], label: str) -> Any:
    """Return the one item of sound of a prompt, None if there is none."""
    data = prompt.get(_DATA)
    if data is None:
        return None
    if not isinstance(data, Mapping) or data.keys() - {"audio"}:
        message = f"{label}: {_DATA!r} must be a dict with the key audio alone, got {shown(data)}."
        raise VLLMValidationError(message, parameter=_DATA, value=shown(data))
    sound = data.get("audio")
    if isinstance(sound, list) and len(sound) == 1:
        [sound] = sound
    if isinstance(sound, list):
        message = f"{label}[{_DATA!r}]['audio']: At most 1 audio(s) may be provided in one prompt."
        raise VLLMValidationError(message, parameter=_DATA, value=len(sound))
    return sound

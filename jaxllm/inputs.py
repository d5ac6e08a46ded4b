"""The forms of a prompt besides plain text and token ids: dicts of one of the types below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class _MediaFields(TypedDict):
    """The fields of a prompt's images, videos and sounds, for models that take them."""

    multi_modal_data: NotRequired[Mapping[str, Any]]
    """By "image", "video" or "audio" one item or a list of them: images as PIL images, arrays [height, width, channels]
    or the bytes of files, videos as arrays [frames, height, width, channels], pairs of one and its metadata, lists of
    PIL images, or the bytes of files, sounds as arrays of floats [n], pairs of one, or of [channels, n], and its
    samples a second, or the bytes of files.
    """
    multi_modal_uuids: NotRequired[Mapping[str, str | list[str | None]]]
    """By "image", "video" or "audio" a name for each item, or None. It takes the place of a hash of the content."""
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    """Options of the model's image processor for this prompt."""


class TextPrompt(_MediaFields):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Only requests with the same salt share prefix-cache blocks."""


class TokensPrompt(_MediaFields):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """The text of the ids, passed through to the output."""
    token_type_ids: NotRequired[list[int]]
    """For models that accept pairs: 0 for each token of the first text, 1 for each of the second."""
    cache_salt: NotRequired[str]
    """Only requests with the same salt share prefix-cache blocks."""


class EmbedsPrompt(TypedDict):
    """A prompt as the embeddings of its tokens, for engines with enable_prompt_embeds=True."""

    prompt_embeds: Any
    """An array [n, d] of floats, of NumPy, JAX or torch, as HF takes it for inputs_embeds; or a safetensors file with
    one tensor, or a .npy file, in base64.
    """
    prompt: NotRequired[str]
    """The text of the tokens, passed through to the output."""
    cache_salt: NotRequired[str]
    """Only requests with the same salt share prefix-cache blocks."""


class TextPairPrompt(TypedDict):
    """A prompt of two texts for cross-encoders; the tokenizer joins them as a pair."""

    prompt: str
    text_pair: str


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | TextPairPrompt

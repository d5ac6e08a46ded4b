"""Decode added tokens to their own text; a byte-level decoder would read the letters of `ção` as bytes E7 E3 6F."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MARK = "\U0010ffff"
"""A code point that makes the decoder take a token as text: it stands for no byte, and no text contains it."""


def decoding_backend(backend: Backend) -> Backend:
    """Return a tokenizer that decodes like `backend`, but added tokens to their own text. It cannot encode."""
    words = _mistakable(backend)
    if not words:
        return backend
    data: dict[str, Any] = json.loads(backend.to_str())
    model, vocab = data["model"], data["model"]["vocab"]
    if not _has_byte_level(data["decoder"]) or not isinstance(vocab, dict):
        return backend
    # Tokens made by merges stand for bytes; adding them again changes nothing.
    words -= {"".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model.get("merges", ())}
    for token in data["added_tokens"]:
        if token["content"] in words:
            token["content"] = _MARK + token["content"]
    model["vocab"] = {_MARK + token if token in words else token: index for token, index in vocab.items()}
    model["merges"] = []
    without_mark = {"type": "Replace", "pattern": {"String": _MARK}, "content": ""}
    data["decoder"] = {"type": "Sequence", "decoders": [data["decoder"], without_mark]}
    return type(backend).from_str(json.dumps(data | dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))))


def _mistakable(backend: Backend) -> set[str]:
    """Return the added tokens that could be read as bytes. A single letter is a byte of the alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    words = {token.content for token in backend.get_added_tokens_decoder().values()}
    return {word for word in words if len(word) > 1 and not word.isascii() and alphabet.issuperset(word)}


def _has_byte_level(decoder: Any) -> bool:
    kind = decoder and decoder["type"]
    return kind == "ByteLevel" or (kind == "Sequence" and any(map(_has_byte_level, decoder["decoders"])))

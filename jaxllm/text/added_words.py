"""Added tokens are text, also where a byte-level decoder reads their letters as bytes: E7 E3 6F for `ção`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MARK = "\U0010ffff"
"""The decoder takes a token with this code point as text: it spells no byte, and no text has it."""


def decoding_backend(backend: Backend) -> Backend:
    """Return a tokenizer that decodes as `backend` does, but added tokens to their own text. It cannot encode."""
    words = _mistakable(backend)
    if not words:
        return backend
    data: dict[str, Any] = json.loads(backend.to_str())
    model, vocab = data["model"], data["model"]["vocab"]
    if not _has_byte_level(data["decoder"]) or not isinstance(vocab, dict):
        return backend
    # What merges make was learned from bytes; adding it again changes nothing.
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
    """Return the added tokens that could be spelled bytes. One letter alone is a byte of the alphabet itself."""
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    words = {token.content for token in backend.get_added_tokens_decoder().values()}
    return {word for word in words if len(word) > 1 and not word.isascii() and alphabet.issuperset(word)}


def _has_byte_level(decoder: Any) -> bool:
    kind = decoder and decoder["type"]
    return kind == "ByteLevel" or (kind == "Sequence" and any(map(_has_byte_level, decoder["decoders"])))

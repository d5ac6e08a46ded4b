"""A byte-level tokenizer that fills the tiny models' vocabulary of 256: special tokens, bytes, pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<s>", "</s>", "<think>", "</think>", "<tool>", "<call>")
EOS, THINK, END_THINK, TOOL = (SPECIALS.index(text) for text in ("</s>", "<think>", "</think>", "<tool>"))
VOCAB_SIZE = 256
SPACED = " <tool>"
"""The text that the decoder makes of TOOL: a space comes before it, as in some families."""


def token_bytes(specials: Sequence[str] = SPECIALS, newlines: int = 1) -> list[bytes]:
    """Return the token of each id; special tokens by name, and then tokens of 2 to this many newlines."""
    singles = [b"\n", *(bytes([byte]) for byte in (*range(0x20, 0x7F), 0xC3, *range(0x80, 0xC0)))]
    pairs = [first + bytes([second]) for first in (b" ", b"t", b"e", b"n") for second in range(ord("a"), ord("z") + 1)]
    tokens = (
        [text.encode() for text in specials] + [b"\n" * count for count in range(2, newlines + 1)] + singles + pairs
    )
    return tokens[:VOCAB_SIZE]


def save_tokenizer(path: Path) -> str:
    """Write the tokenizer into a folder and return its name."""
    backend = make_backend(SPECIALS)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(SPECIALS[TOOL], SPACED)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(path)
    return str(path)


def make_backend(specials: Sequence[str], newlines: int = 1) -> Tokenizer:
    """Return a tokenizer of these special tokens, tokens of up to this many newlines, bytes and pairs, in order."""
    spelled = [_as_characters(token) for token in token_bytes(specials, newlines)[len(specials) :]]
    vocab = {text: token_id for token_id, text in enumerate([*specials, *spelled])}
    pairs = [(text[:-1], text[-1]) for text in spelled if len(text) > 1]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    # Newlines may be merged only where words are not cut apart first.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=newlines == 1)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return backend


def ids_of(text: str) -> list[int]:
    """Return one token per character; each must have one."""
    tokens = token_bytes()
    return [tokens.index(character.encode()) for character in text]


def _as_characters(token: bytes) -> str:
    """Spell bytes as byte-level vocabularies do: GPT-2's table gives each byte a printable character."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in token)

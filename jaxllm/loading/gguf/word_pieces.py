"""Build BERT's tokenizer from GGUF metadata, where pieces that begin a word are marked instead of those that go on."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.special_tokens import CONTROL, PREFIX

_WORD, _CONTINUED = "\u2581", "##"
_FRAME = {
    "cls_token": (("cls_token_id", "bos_token_id"), 101),
    "sep_token": (("seperator_token_id", "separator_token_id", "eos_token_id"), 102),
    "mask_token": (("mask_token_id",), 103),
}
"""The keys of tokens, the first that is present counts, and llama.cpp's default; the first spelling is llama.cpp's."""


def spell(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Return HF's spelling of the tokens: pieces that go on with a word begin with ##."""

    def spelled(token: str, kind: int) -> str:
        if kind == CONTROL:
            return token
        return token[1:] if token.startswith(_WORD) else _CONTINUED + token

    return [spelled(token, kind) for token, kind in zip(tokens, types, strict=True)]


def frame_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    """Return the tokens before, between and in place of texts, by transformers' names."""
    texts: dict[str, str] = {}
    for name, (keys, default) in _FRAME.items():
        index: int = next((file.value(PREFIX + key, int) for key in keys if PREFIX + key in file), default)
        if 0 <= index < len(tokens):
            texts[name] = tokens[index]
        elif name != "mask_token":
            raise ValueError(f"{PREFIX}{keys[0]} is {index}, but there are {len(tokens)} tokens")
    return texts


def word_pieces(file: GGUFFile, tokens: Sequence[str], unknown: str, frame: dict[str, str]) -> Tokenizer:
    """Build a WordPiece tokenizer of HF's spellings.

    Files from before llama.cpp wrote whether capital letters count lack the key: they do if a token has one.
    """
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    has_capitals = any("A" <= token[0] <= "Z" for token in tokens if token)
    lowercase = file.value(PREFIX + "normalizer.lowercase", bool, not has_capitals)
    strips = file.value(PREFIX + "normalizer.strip_accents", bool, lowercase)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUED)
    first, end = frame["cls_token"], frame["sep_token"]
    tokenizer.post_processor = processors.BertProcessing((end, vocab[end]), (first, vocab[first]))
    return tokenizer

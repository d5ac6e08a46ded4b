"""Build XLM-RoBERTa's tokenizer from GGUF metadata: pieces with scores; a text is spelled with the best."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.special_tokens import PREFIX, UNUSED

_CHARSMAP, _MASK = PREFIX + "precompiled_charsmap", PREFIX + "mask_token_id"


def mask_id(file: GGUFFile, types: Sequence[int]) -> int | None:
    """Return the id of the token that stands for a hidden word, if the file has one that is in use."""
    index = file.value(_MASK, int)
    return index if index is not None and 0 <= index < len(types) and types[index] != UNUSED else None


def unigrams(file: GGUFFile, tokens: Sequence[str], types: Sequence[int], unknown: int) -> Tokenizer:
    """Build a tokenizer of the file's pieces and scores, with its table of characters that stand for others."""
    if not file.is_array(PREFIX + "scores"):
        raise ValueError(f"the file has no {PREFIX}scores")
    scores = file.array(PREFIX + "scores").tolist()
    if len(scores) < len(tokens):
        raise ValueError(f"{len(scores)} scores for {len(tokens)} tokens")
    used = [score for score, kind in zip(scores, types, strict=False) if kind != UNUSED]
    # An unknown character scores less than the least piece, so fillers must not; with a space none is ever found.
    pieces = [
        (f" {token}", min(used)) if kind == UNUSED else (token, score)
        for token, score, kind in zip(tokens, scores, types, strict=False)
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    if file.is_array(_CHARSMAP):
        tokenizer.normalizer = normalizers.Precompiled(file.array(_CHARSMAP).tobytes())
    prefix = "always" if file.value(PREFIX + "add_space_prefix", bool, True) else "never"
    spaces = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    return tokenizer


def add_mask(tokenizer: Tokenizer, token: str) -> None:
    """Make the token special that stands for a hidden word; it absorbs the space before it."""
    tokenizer.add_special_tokens([AddedToken(token, lstrip=True, normalized=False, special=True)])


def put_between(tokenizer: Tokenizer, first: tuple[str, int], end: tuple[str, int]) -> None:
    """Put each text between two tokens, by text and id, as XLM-RoBERTa does: two ends are between texts of a pair."""
    single, other = [first[0], "$A", end[0]], [end[0], "$B", end[0]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *other], special_tokens=[first, end]
    )

"""Read how a ColBERT model makes tokens of queries and documents: from PyLate's files, newer ones, or Stanford's."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.loading.sentence_transformers import METADATA_KEY, METADATA_NAME, SENTENCE_FILES, SentenceFiles, named
from jaxllm.models.fields import read_bool, read_choice, read_int, read_mapping, read_optional_int
from jaxllm.params.checks import shown

_QUERY_LENGTH, _DOCUMENT_LENGTH = 32, 180
"""PyLate's limits where the files have none."""
_MARKS = ("[unused0]", "[unused1]")
_JINA_MARKS = ("[QueryMarker]", "[DocumentMarker]")
"""The marks of queries and documents where Stanford's file has none: BERT's, and Jina's."""
_STRATEGIES = ("fixed", "min")
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""The names of the prompts for each side; the first one that there is counts."""


@dataclass(frozen=True)
class TextForm:
    """How a text becomes the tokens of a query or of a document."""

    prompt: str = ""
    """The text that is put before it."""
    mark: str = ""
    """The token that is inserted after the first one; "" for none."""
    max_tokens: int | None = None
    """The most tokens, the mark included; None for as many as the model takes."""
    filled_to: int = 0
    """The number of tokens up to which fillers follow a shorter text."""
    skipped: tuple[str, ...] = ()
    """The words that do not count in scores, as far as they are tokens."""
    strips: bool = False
    """Prompt and text are read without the blanks around them."""
    skips_unknown: bool = False
    """The tokenizer's token for unknown words does not count either if one of the words to skip is no token."""


@dataclass(frozen=True)
class LateInteraction:
    """How the texts of a ColBERT model become tokens."""

    query: TextForm
    document: TextForm
    filler: str | None = None
    """The token that fills up queries; None for the tokenizer's mask, or else its end."""
    attends: bool = False
    """Tokens attend to fillers."""


def read_late_interaction(files: SentenceFiles, hf: Mapping[str, Any]) -> LateInteraction | None:
    """Read the settings of a ColBERT model's files; None for other models. Errors name the file and the key."""
    if files.has("MultiVectorMask") or files.settings.get("model_type") == "MultiVectorEncoder":
        return _read_modules(files)
    if files.is_multi_vector:
        with named(files.source, SENTENCE_FILES[1]):
            return _read_pylate(files.settings)
    if METADATA_KEY not in hf:
        return None
    with named(files.source, METADATA_NAME):
        is_jina = hf.get("position_embedding_type") == "rotary"
        return _read_stanford(read_mapping(hf, METADATA_KEY), *(_JINA_MARKS if is_jina else _MARKS))


def _read_pylate(settings: Mapping[str, Any]) -> LateInteraction:
    """Read PyLate's keys of config_sentence_transformers.json."""
    prompts = _read_prompts(settings)
    default = prompts.get(str(settings.get("default_prompt_name")), "")
    query = TextForm(
        prompts.get("query") or default,
        _read_text(settings, "query_prefix", "[Q] "),
        read_int(settings, "query_length", _QUERY_LENGTH, minimum=3),
        strips=True,
    )
    document = TextForm(
        prompts.get("document") or default,
        _read_text(settings, "document_prefix", "[D] "),
        read_int(settings, "document_length", _DOCUMENT_LENGTH, minimum=3),
        skipped=_read_words(settings, "skiplist_words", tuple(string.punctuation)),
        strips=True,
        skips_unknown=True,
    )
    if read_bool(settings, "do_query_expansion", True):
        query = replace(query, filled_to=query.max_tokens or 0)
    return LateInteraction(query, document, attends=read_bool(settings, "attend_to_expansion_tokens"))


def _read_stanford(metadata: Mapping[str, Any], query_mark: str, document_mark: str) -> LateInteraction:
    """Read artifact.metadata, or an empty one, as PyLate does; the marks are those where it has none."""
    length = read_int(metadata, "query_maxlen", _QUERY_LENGTH, minimum=3)
    query = TextForm("", _read_text(metadata, "query_token_id", query_mark), length, filled_to=length, strips=True)
    skips = read_bool(metadata, "mask_punctuation", True)
    document = TextForm(
        "",
        _read_text(metadata, "doc_token_id", document_mark),
        read_int(metadata, "doc_maxlen", _DOCUMENT_LENGTH, minimum=3),
        skipped=tuple(string.punctuation) if skips else (),
        strips=True,
        skips_unknown=True,
    )
    return LateInteraction(query, document, attends=read_bool(metadata, "attend_to_mask_tokens"))


def _read_modules(files: SentenceFiles) -> LateInteraction:
    """Read the settings of the modules of sentence-transformers 6."""
    with named(files.source, SENTENCE_FILES[1]):
        prompts = _read_prompts(files.settings)
    mask = next((module for module in files.modules if module.kind == "MultiVectorMask"), None)
    skipped: tuple[str, ...] = ()
    skips: tuple[str, ...] = ("document",)
    if mask is not None:
        with named(files.source, f"{mask.folder}/config.json"):
            skipped = _read_words(mask.config, "skiplist_words", ())
            skips = _read_words(mask.config, "skiplist_tasks", skips)
            if mask.config.get("keep_only_token_ids"):
                raise ValueError("keep_only_token_ids is not supported: it is for images")
    with named(files.source, SENTENCE_FILES[2]):
        query, document = (
            TextForm(
                next((prompts[name] for name in names if name in prompts), ""),
                max_tokens=read_optional_int(files.encoder, f"{side}_length"),
                skipped=skipped if side in skips else (),
            )
            for side, names in _PROMPTS.items()
        )
        expansion = read_mapping(files.encoder, "query_expansion")
        if not expansion:
            return LateInteraction(query, document)
        length = read_int(expansion, "length", minimum=1)
        strategy = read_choice(expansion, "strategy", _STRATEGIES, "")
        most = length if strategy == "fixed" else query.max_tokens
        query = replace(query, max_tokens=most, filled_to=length)
        filler = _read_text(expansion, "token", "") or None
        return LateInteraction(query, document, filler, read_bool(expansion, "attend"))


def _read_prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in read_mapping(settings, "prompts").items() if isinstance(text, str)}


def _read_text(values: Mapping[str, Any], key: str, default: str) -> str:
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is {shown(value)}, expected a text")
    return value


def _read_words(values: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{key} is {shown(value)}, expected a list of words")
    return tuple(value)

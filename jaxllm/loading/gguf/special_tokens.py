"""Find the tokens of a GGUF file that begin and end texts: from its keys, llama.cpp's defaults, and token names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxllm.loading.gguf.file import GGUFFile

PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's numbers for token types."""

_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"bos": 101, "unk": 100, "pad": 0},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
"""Default ids by tokenizer kind, which a file may omit. llama.cpp ends byte-level texts with token 11, which is right
for Falcon alone; its name there ends texts anyway.
"""
_END_KEYS = ("eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_END_NAMES = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
        # Tokens after a filled-in piece of code: padding, another repository, another file.
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    )
)
"""Tokens with these names end a text, whatever else the file declares."""
_MARK_NAMES = frozenset(
    (
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|constrain|>",
        # Tokens before, after and in place of a piece of code to fill in.
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<\uff5cfim\u2581begin\uff5c>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
        "<|middle|>",
    )
)
"""Tokens with these names are read whole in a text, whatever their type."""
_MARKUP_END = "</s>"
"""This token ends a text only if it is a control token: Gemma's vocabularies have it for HTML."""
_MESSAGE_END = "<|end|>"
_CHANNEL_FORMATS = (("<|return|>", "<|call|>"), ("<|flush|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
"""In vocabularies with both tokens of a pair (gpt-oss and Solar), `<|end|>` ends a message within an answer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a file."""

    roles: Mapping[str, int]
    """The ids of the roles "bos", "eos", "unk" and "pad", where the file has them."""
    ends: tuple[int, ...]
    """The ids that end a text, the one with the role "eos" first."""
    marks: frozenset[int] = frozenset()
    """Other ids of tokens that are read whole."""


def read_special_tokens(file: GGUFFile, tokens: Sequence[str], num_ids: int) -> SpecialTokens:
    """Return the special tokens of a file with these `tokens`, possibly none; ids from `num_ids` on are ignored."""
    roles = _roles(file, num_ids)
    names = _named_ends(file, tokens)
    keys = [file.value(PREFIX + key, int) for key in _END_KEYS]
    declared = [roles.get("eos"), *_listed_ends(file), *keys]
    ends = dict.fromkeys(each for each in declared if each is not None and 0 <= each < num_ids)
    ends |= dict.fromkeys(names.values())
    if any(first in names and second in names for first, second in _CHANNEL_FORMATS):
        ends.pop(names.get(_MESSAGE_END, -1), None)
    if ends and "eos" in roles:
        roles["eos"] = next(iter(ends))
    marks = frozenset(index for index, token in enumerate(tokens) if token in _MARK_NAMES)
    return SpecialTokens(roles, tuple(ends), marks)


def _roles(file: GGUFFile, num_ids: int) -> dict[str, int]:
    """Return the id of each role; an invalid id is replaced by the default of the file's tokenizer kind."""
    defaults = _DEFAULTS.get(file.value(PREFIX + "model", str, ""), {})
    roles: dict[str, int] = {}
    for role, key in _ROLES.items():
        default = defaults.get(role)
        index = file.value(PREFIX + key, int, default)
        if index is not None and not 0 <= index < num_ids:
            logger.warning("%s is %d, but there are %d tokens; it counts as absent", PREFIX + key, index, num_ids)
            index = default
        if index is not None and index < num_ids:
            roles[role] = index
    return roles


def _listed_ends(file: GGUFFile) -> list[int]:
    """Return the end ids in the list that Ollama's converter writes."""
    key = PREFIX + "eos_token_ids"
    if not file.is_array(key):
        return []
    values = file.array(key)
    if values.dtype.kind not in "iu":
        raise ValueError(f"the metadata key {key!r} holds {values.dtype.name}, not integers")
    return values.tolist()


def _named_ends(file: GGUFFile, tokens: Sequence[str]) -> dict[str, int]:
    """Return the tokens with names that end a text, in the order of their ids."""
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token in _END_NAMES or (token == _MARKUP_END and _type_of(file, index) in (CONTROL, None)):
            ids.setdefault(token, index)
    return ids


def _type_of(file: GGUFFile, index: int) -> int | None:
    """Return the type of a token; None if the file has no types."""
    key = PREFIX + "token_type"
    if not file.is_array(key):
        return None
    types = file.array(key)
    return int(types[index]) if index < len(types) else None

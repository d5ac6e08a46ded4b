"""Build a tokenizer of the tokenizers library from GGUF metadata, in transformers' wrapper (without torch)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.special_tokens import CONTROL, NORMAL, PREFIX, USER_DEFINED, SpecialTokens, read_special_tokens
from jaxllm.loading.gguf.text_splitting import SPLITTINGS, Splitting
from jaxllm.loading.gguf.unigrams import add_mask, mask_id, put_between, unigrams
from jaxllm.loading.gguf.word_pieces import frame_tokens, spell, word_pieces
from jaxllm.loading.hf import PreTrainedTokenizerFast

_SPACE = "\u2581"
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that are not part of a chat format."""

logger = logging.getLogger(__name__)


class _GGUFTokenizer(PreTrainedTokenizerFast):
    """transformers' wrapper, without its copy of the tokenizer, which takes a second or more."""

    def __init__(self, *, backend: Tokenizer, **kwargs: Any) -> None:
        self._tokenizer = backend
        super().__init__(**kwargs)


def build_tokenizer(file: GGUFFile) -> _GGUFTokenizer:
    """Build the tokenizer that the file describes. Raises ValueError for an unsupported kind."""
    if not file.is_array(PREFIX + "tokens"):
        raise ValueError(f"the file has no {PREFIX}tokens, so it describes no tokenizer")
    tokens = file.strings(PREFIX + "tokens")
    special = read_special_tokens(file, tokens, len(tokens))
    kind = file.value(PREFIX + "model", str, "")
    if kind == "bert":
        return _bert_tokenizer(file, tokens, special)
    if kind == "t5":
        return _xlm_tokenizer(file, tokens, special)
    adds_bos = file.value(PREFIX + "add_bos_token", bool)
    if kind == "gpt2":
        splitting = _splitting(file)
        tokenizer = _byte_level(file, tokens, splitting)
        adds_bos = splitting.adds_bos if adds_bos is None else adds_bos
    elif kind in ("llama", "gemma4"):
        unknown = special.roles.get("unk")
        tokenizer = _sentencepiece(file, tokens, unknown, has_merges=kind == "gemma4")
        # Files of Gemma 4 with another setting are wrong, and llama.cpp overrides them too.
        adds_bos = kind == "gemma4" or adds_bos is None or adds_bos
    else:
        raise ValueError(
            f"the tokenizer kind {kind!r} is not supported; gpt2 (byte-level BPE), llama and gemma4 (SPM), bert "
            "(WordPiece) and t5 (unigrams) are"
        )
    # Files lack this setting of Phi-3's own tokenizer; llama.cpp detects the model by name too.
    strips = any(name in file.value("general.name", str, "").lower() for name in ("phi-3", "phi3"))
    _add_whole_tokens(tokenizer, tokens, _token_types(file, len(tokens), special), strips=strips)
    texts = {f"{role}_token": tokens[index] for role, index in special.roles.items()}
    return _GGUFTokenizer(
        backend=tokenizer,
        add_bos_token=adds_bos and "bos_token" in texts,
        add_eos_token=file.value(PREFIX + "add_eos_token", bool, False) and "eos_token" in texts,
        clean_up_tokenization_spaces=False,
        chat_template=_chat_template(file),
        **texts,
    )


def _bert_tokenizer(file: GGUFFile, tokens: Sequence[str], special: SpecialTokens) -> _GGUFTokenizer:
    """Build BERT's tokenizer, which puts each text between two tokens."""
    types = _token_types(file, len(tokens), special)
    spelled = spell(tokens, types)
    if "unk" not in special.roles:
        raise ValueError(f"the file has no {PREFIX}unknown_token_id")
    texts = {f"{role}_token": spelled[special.roles[role]] for role in ("unk", "pad") if role in special.roles}
    frame = frame_tokens(file, spelled)
    tokenizer = _checked(lambda: word_pieces(file, spelled, texts["unk_token"], frame))
    _add_whole_tokens(tokenizer, spelled, types, strips=False)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return _GGUFTokenizer(
        backend=tokenizer, model_input_names=names, clean_up_tokenization_spaces=False, **texts, **frame
    )


def _xlm_tokenizer(file: GGUFFile, tokens: Sequence[str], special: SpecialTokens) -> _GGUFTokenizer:
    """Build the tokenizer of XLM-RoBERTa, which puts each text between two tokens."""
    missing = [role for role in ("bos", "eos", "unk") if role not in special.roles]
    if missing:
        raise ValueError(f"the file names no token for {', '.join(missing)}, which a text is put between")
    for key in ("add_bos_token", "add_eos_token"):
        if not file.value(PREFIX + key, bool, True):
            raise ValueError(f"{PREFIX}{key} is false; unigrams are supported with both tokens around a text")
    types = _token_types(file, len(tokens), special)
    texts = {role: tokens[index] for role, index in special.roles.items()}
    first, end = ((texts[role], special.roles[role]) for role in ("bos", "eos"))
    tokenizer = _checked(lambda: unigrams(file, tokens, types, special.roles["unk"]))
    names = {f"{role}_token": text for role, text in texts.items()} | {"cls_token": first[0], "sep_token": end[0]}
    if (mask := mask_id(file, types)) is not None:
        types[mask], names["mask_token"] = NORMAL, tokens[mask]
        add_mask(tokenizer, tokens[mask])
    _add_whole_tokens(tokenizer, tokens, types, strips=False)
    put_between(tokenizer, first, end)
    return _GGUFTokenizer(
        backend=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **names,
    )


def _splitting(file: GGUFFile) -> Splitting:
    name = file.value(PREFIX + "pre", str, "default") or "default"
    if name not in SPLITTINGS:
        raise ValueError(f"the pre-tokenizer {name!r} is not supported; supported: {', '.join(SPLITTINGS)}")
    if name == "default":
        logger.warning("The file names no pre-tokenizer; texts may be cut otherwise than in training. Convert it anew.")
    return SPLITTINGS[name]


def _byte_level(file: GGUFFile, tokens: Sequence[str], splitting: Splitting) -> Tokenizer:
    """Build a GPT-2 style BPE, whose alphabet spells every byte as a printable character."""
    vocab, merges = _vocabulary(tokens), _stored_merges(file)
    tokenizer = _checked(lambda: Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.ignore_merges)))
    if splitting.compose or file.value(PREFIX + "normalizer.nfc", bool, False):
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    prefix = file.value(PREFIX + "add_space_prefix", bool, False)
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spelling])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(file: GGUFFile) -> list[tuple[str, str]]:
    if not file.is_array(PREFIX + "merges"):
        raise ValueError(f"the file has no {PREFIX}merges")
    return [_merge(line) for line in file.strings(PREFIX + "merges")]


def _merge(line: str) -> tuple[str, str]:
    left, gap, right = line.partition(" ")
    if not gap or " " in right:
        raise ValueError(f"the merge {line!r} is not two tokens")
    return left, right


def _sentencepiece(file: GGUFFile, tokens: list[str], unknown: int | None, *, has_merges: bool) -> Tokenizer:
    """Build an SPM BPE: spaces are spelled as U+2581, and bytes as <0x..> where no token fits.

    Merges are the file's own if it `has_merges`, and otherwise follow from the scores.
    """
    # Files spell runs of spaces with spaces, the tokenizer with its own mark.
    spelled = [token.replace(" ", _SPACE) if token.isspace() and " " in token else token for token in tokens]
    vocab = _vocabulary(spelled)
    merges = _stored_merges(file) if has_merges else _merges(vocab, spelled, _merge_order(file, len(tokens)))
    options: dict[str, Any] = {"unk_token": spelled[unknown]} if unknown is not None else {}
    tokenizer = _checked(lambda: Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True, **options)))
    prefix = file.value(PREFIX + "add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merge_order(file: GGUFFile, num_tokens: int) -> list[float]:
    """Return each token's score. Gemma's merges follow the tokens' positions instead of their scores."""
    if file.value("general.architecture", str, "").startswith("gemma"):
        return [-float(position) for position in range(num_tokens)]
    if not file.is_array(PREFIX + "scores"):
        raise ValueError(f"the file has no {PREFIX}scores")
    scores = file.array(PREFIX + "scores").tolist()
    if len(scores) < num_tokens:
        raise ValueError(f"{len(scores)} scores for {num_tokens} tokens")
    return scores[:num_tokens]


def _merges(vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every way to join two tokens into another, best token first, and longer left parts first."""
    order = sorted(range(len(tokens)), key=lambda index: -scores[index])
    merges: list[tuple[str, str]] = []
    for index in order:
        token = tokens[index]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    return merges


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Return token -> id; for tokens with the same spelling, the first."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return vocab


def _token_types(file: GGUFFile, num_tokens: int, special: SpecialTokens) -> list[int]:
    """Return the type of each token, normal if the file has none; tokens that end texts are always control tokens."""
    types = [NORMAL] * num_tokens
    if file.is_array(PREFIX + "token_type"):
        types = file.array(PREFIX + "token_type").tolist()
    if len(types) < num_tokens:
        raise ValueError(f"{len(types)} token types for {num_tokens} tokens")
    marks = [index for index in special.marks if types[index] != USER_DEFINED]
    for index in (*special.ends, *marks):
        types[index] = CONTROL
    return types[:num_tokens]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], *, strips: bool) -> None:
    """Make control tokens special, and match user-defined ones whole anywhere in the text.

    With `strips`, tokens of the chat format absorb the white space after them.
    """
    known = tokenizer.get_vocab(with_added_tokens=False)
    by_type: dict[int, list[AddedToken]] = {CONTROL: [], USER_DEFINED: []}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        # A token with another spelling in the vocabulary, or a repeated one, would get a new id.
        if kind in by_type and token and known.get(token) == index:
            rstrip = strips and token not in _KEEP_SPACES
            by_type[kind].append(AddedToken(token, rstrip=rstrip, normalized=False, special=kind == CONTROL))
    tokenizer.add_special_tokens(by_type[CONTROL])
    tokenizer.add_tokens(by_type[USER_DEFINED])


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the chat template, or several by name."""
    default = file.value("tokenizer.chat_template", str)
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): file.value(key, str) for key in file.keys if key.startswith(prefix)}
    if not named:
        return default
    return named | ({"default": default} if default is not None else {})


def _checked(build: Callable[[], Tokenizer]) -> Tokenizer:
    """Call `build`; the library raises bare Exceptions for vocabularies that contradict themselves."""
    try:
        return build()
    except Exception as error:
        raise ValueError(f"the tokenizer's vocabulary cannot be used: {error}") from error

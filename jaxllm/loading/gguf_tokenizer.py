"""GGUF metadata become a tokenizer of the tokenizers library, wrapped as transformers has them (without torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.loading.gguf import GGUFFile
from jaxllm.loading.hf import PreTrainedTokenizerFast

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """The way in which a byte-level vocabulary cuts text before its merges."""

    pattern: str | None = None
    """A regex of words; None for GPT-2's own."""
    single_digits: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is taken whole."""
    compose: bool = False
    """Characters are composed (NFC) first."""
    adds_bos: bool = False
    """True if a BOS token is added where the file does not say."""


_GPT2 = _Splitting()
_DIGITS = _Splitting(single_digits=True)
_LLAMA3 = _Splitting(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_QWEN2 = _Splitting(_QWEN2_SPLIT, compose=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _Splitting(_LLAMA3_SPLIT)),
    "tekken": _Splitting(_TEKKEN_SPLIT, ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Splitting(_O200K_SPLIT)),
}
"""The splitting for each value of tokenizer.ggml.pre."""


class GGUFTokenizer(PreTrainedTokenizerFast):
    """This is transformers' wrapper: it would copy a tokenizer passed as an argument, which takes a second or more."""

    def __init__(self, *, backend: Tokenizer, **kwargs: Any) -> None:
        self._tokenizer = backend
        super().__init__(**kwargs)


def build_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Build the tokenizer that the file describes. Raises ValueError for a kind that is not supported."""
    for key in ("tokens", "token_type"):
        if not file.is_array(_PREFIX + key):
            raise ValueError(f"the file has no {_PREFIX}{key}, so it describes no tokenizer")
    tokens = file.strings(_PREFIX + "tokens")
    kind = file.value(_PREFIX + "model", str, "")
    if kind == "gpt2":
        splitting = _splitting(file)
        tokenizer, adds_bos = _byte_level(file, tokens, splitting), splitting.adds_bos
    elif kind in ("llama", "gemma4"):
        tokenizer, adds_bos = _sentencepiece(file, tokens, has_merges=kind == "gemma4"), True
    else:
        raise ValueError(
            f"the tokenizer kind {kind!r} is not supported; gpt2 (byte-level BPE), llama and gemma4 (SPM) are"
        )
    _add_whole_tokens(tokenizer, tokens, file.array(_PREFIX + "token_type").tolist())
    special = _special_tokens(file, tokens)
    return GGUFTokenizer(
        backend=tokenizer,
        add_bos_token=file.value(_PREFIX + "add_bos_token", bool, adds_bos) and "bos_token" in special,
        add_eos_token=file.value(_PREFIX + "add_eos_token", bool, False) and "eos_token" in special,
        clean_up_tokenization_spaces=False,
        chat_template=_chat_template(file),
        **special,
    )


def _splitting(file: GGUFFile) -> _Splitting:
    name = file.value(_PREFIX + "pre", str, "default")
    if name not in _SPLITTINGS:
        raise ValueError(f"the pre-tokenizer {name!r} is not supported; supported: {', '.join(_SPLITTINGS)}")
    return _SPLITTINGS[name]


def _byte_level(file: GGUFFile, tokens: Sequence[str], splitting: _Splitting) -> Tokenizer:
    """Build a GPT-2 style BPE, whose alphabet spells every byte as a printable character."""
    vocab, merges = _vocabulary(tokens), _stored_merges(file)
    tokenizer = _checked(lambda: Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.ignore_merges)))
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
    if splitting.pattern:
        first.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    prefix = file.value(_PREFIX + "add_space_prefix", bool, False)
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=splitting.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(file: GGUFFile) -> list[tuple[str, str]]:
    if not file.is_array(_PREFIX + "merges"):
        raise ValueError(f"the file has no {_PREFIX}merges")
    return [_merge(line) for line in file.strings(_PREFIX + "merges")]


def _merge(line: str) -> tuple[str, str]:
    left, gap, right = line.partition(" ")
    if not gap or " " in right:
        raise ValueError(f"the merge {line!r} is not two tokens")
    return left, right


def _sentencepiece(file: GGUFFile, tokens: list[str], *, has_merges: bool) -> Tokenizer:
    """Build an SPM BPE: spaces spelled as U+2581, bytes as <0x..> where no token fits.

    Merges are the file's own if it `has_merges`, and otherwise follow from the scores.
    """
    # Files spell runs of spaces as such, the tokenizer with its own mark.
    spelled = [token.replace(" ", _SPACE) if token.isspace() and " " in token else token for token in tokens]
    vocab = _vocabulary(spelled)
    merges = _stored_merges(file) if has_merges else _merges(vocab, spelled, _merge_order(file, len(tokens)))
    unknown = _token(file, tokens, "unknown_token_id")
    options: dict[str, Any] = {"unk_token": unknown} if unknown is not None else {}
    tokenizer = _checked(lambda: Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True, **options)))
    prefix = file.value(_PREFIX + "add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merge_order(file: GGUFFile, num_tokens: int) -> list[float]:
    """Return each token's score. Gemma's do not follow the order of its merges, but its tokens' positions do."""
    if file.value("general.architecture", str, "").startswith("gemma"):
        return [-float(position) for position in range(num_tokens)]
    if not file.is_array(_PREFIX + "scores"):
        raise ValueError(f"the file has no {_PREFIX}scores")
    scores = file.array(_PREFIX + "scores").tolist()
    if len(scores) != num_tokens:
        raise ValueError(f"{len(scores)} scores for {num_tokens} tokens")
    return scores


def _merges(vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every way to make a token of two others, the best token first, and with longer left parts first."""
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
    """Return token -> id; of tokens that are spelled alike the first one counts."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return vocab


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make control tokens special, and user-defined ones whole, wherever the text has them."""
    if len(types) != len(tokens):
        raise ValueError(f"{len(types)} token types for {len(tokens)} tokens")
    known = tokenizer.get_vocab(with_added_tokens=False)
    by_type: dict[int, list[AddedToken]] = {_CONTROL: [], _USER_DEFINED: []}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        # A token that is spelled otherwise in the vocabulary, or twice, would get a new id.
        if kind in by_type and token and known.get(token) == index:
            by_type[kind].append(AddedToken(token, normalized=False, special=kind == _CONTROL))
    tokenizer.add_special_tokens(by_type[_CONTROL])
    tokenizer.add_tokens(by_type[_USER_DEFINED])


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """Return transformers' names of the special tokens that the file declares."""
    keys = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    found = {f"{name}_token": _token(file, tokens, key) for name, key in keys.items()}
    return {name: token for name, token in found.items() if token is not None}


def _token(file: GGUFFile, tokens: list[str], key: str) -> str | None:
    index = file.value(_PREFIX + key, int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ValueError(f"{_PREFIX}{key} is {index}, but there are {len(tokens)} tokens")
    return tokens[index]


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

"""Wrap a Hugging Face fast tokenizer for the engine: batches, truncation, and the text of single tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT64_MAX, check_bool, check_choice, check_int, check_options
from jaxllm.text.added_words import decoding_backend
from jaxllm.text.tokenizer_parts import TokenizerParts

if TYPE_CHECKING:  # both take long to import
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

    from jaxllm.loading.checkpoint import Checkpoint

HALF = "\N{REPLACEMENT CHARACTER}"
"""The character that incomplete characters decode to."""
LONGEST_CHARACTER = 4
"""The maximum number of bytes of a character in UTF-8; each may be a token."""
MAX_REACH = 2**20
"""A text to be cut is tokenized up to this many characters, or as many as its tokens can have."""
_ENCODE_OPTIONS = ("add_special_tokens", "truncation", "max_length", "truncate_prompt_tokens", "truncation_side")


class WholeTexts(dict[int, str]):
    """The texts of tokens that are whole characters whatever is around them; "" for others. It fills as it is asked.

    A byte-level decoder joins the tokens' bytes, so such a token always has the same text: to look it up takes 0.1 us,
    where the library's stream takes 2 us to decode it among its neighbours.
    """

    def __init__(self, backend: Backend, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._backend, self._skip = backend, skip_special_tokens

    def __missing__(self, token_id: int) -> str:
        """Decode a token."""
        text = self._backend.decode([token_id], skip_special_tokens=self._skip)
        text = self[token_id] = "" if HALF in text else text
        return text


class Tokenizer:
    """Converts text to token ids and back."""

    def __init__(self, parts: TokenizerParts, load_hf: Callable[[], PreTrainedTokenizerBase]) -> None:
        """Make a tokenizer from its parts; `load_hf` loads transformers' tokenizer, for users that ask for it."""
        self.parts, self.eos_token_id = parts, parts.eos_token_id
        self._load_hf = load_hf
        self._strings: dict[int, str] = {}
        self._pairs_lock = threading.Lock()

    @classmethod
    def of(cls, hf: PreTrainedTokenizerBase) -> Self:
        """Make one from transformers' tokenizer. Raises VLLMValidationError for a slow one."""
        return cls(TokenizerParts.of(hf), lambda: hf)

    @cached_property
    def backend(self) -> Backend:
        """Return the tokenizers library's tokenizer, which neither truncates nor pads."""
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_buffer(self.parts.tokenizer_json)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.parts.split_special_tokens
        return backend

    @cached_property
    def decoder(self) -> Backend:
        """Return the tokenizers library's tokenizer for decoding: `backend`, unless it decodes added tokens wrongly."""
        return decoding_backend(self.backend)

    @cached_property
    def whole_texts(self) -> tuple[WholeTexts, WholeTexts] | tuple[None, None]:
        """Return the texts of tokens with special ones, and without; None if a token's text depends on others."""
        from tokenizers import decoders

        if not isinstance(self.decoder.decoder, decoders.ByteLevel):
            return None, None
        whole, spoken = (WholeTexts(self.decoder, skip_special_tokens=skip) for skip in (False, True))
        return whole, spoken

    @cached_property
    def _pairs_backend(self) -> Backend:
        """Return a separate tokenizer for pairs: truncation is its state, while other threads encode."""
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.backend.to_str())
        backend.encode_special_tokens = self.parts.split_special_tokens
        return backend

    @cached_property
    def hf(self) -> PreTrainedTokenizerBase:
        """Return transformers' tokenizer, for users; importing transformers takes a second or two."""
        return self._load_hf()

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Return the tokens that were added to the vocabulary as whole strings: special ones and others."""
        return {token_id: token.content for token_id, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Return the texts of the special tokens, which decoding leaves out by default."""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def longest_token(self) -> int:
        """Return the length in characters of the longest vocabulary entry.

        No token stands for more, except white space and unknown words of any length.
        """
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    def reach(self, text: str, keep: int, side: str | None = None) -> str:
        """Return the part of a text that `keep` tokens can cover when cut on a side; None is the tokenizer's side.

        It has room for one more token, since cutting may change the last one. If white space or a long unknown word
        makes fewer tokens, the part is longer, up to MAX_REACH.
        """
        is_left, most = (side or self.parts.truncation_side) == "left", (keep + 1) * self.longest_token
        while most < len(text):
            part = text[-most:] if is_left else text[:most]
            if 2 * most > MAX_REACH or len(self.backend.encode(part, add_special_tokens=False)) > keep:
                return part
            most *= 2
        return text

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, keep: int | None = None, side: str | None = None
    ) -> list[list[int]]:
        """Return the token ids of texts, each cut to `keep` with special tokens; a side of None is the tokenizer's."""
        if not texts:
            return []
        num_added = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        adds_later = keep is not None and num_added > 0
        batch = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens and not adds_later)
        if keep is None:
            return [encoding.ids for encoding in batch]
        side = side or self.parts.truncation_side
        if not adds_later:
            return [cut_ids(encoding.ids, keep, side) for encoding in batch]
        for encoding in batch:
            encoding.truncate(max(0, keep - num_added), direction=side)
        return [self.backend.post_process(encoding).ids for encoding in batch]

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        side: str | None = None,
    ) -> list[tuple[list[int], list[int]]]:
        """Return the token ids and type ids of pairs of texts; a pair over `keep` has its longer text cut.

        The side, "left" or "right", defaults to the tokenizer's. Nothing is cut if `keep` has no room for the special
        tokens.
        """
        with self._pairs_lock:
            backend = self._pairs_backend
            if keep is None:
                backend.no_truncation()
            else:
                backend.enable_truncation(keep, direction=side or self.parts.truncation_side)
            batch = backend.encode_batch(list(pairs), add_special_tokens=add_special_tokens)
        return [(encoding.ids, encoding.type_ids) for encoding in batch]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return self.decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        """Return the text of a single token; an incomplete character shows as U+FFFD."""
        string = self._strings.get(token_id)
        if string is None:
            string = self._strings[token_id] = self._leading_spaces(token_id, self._decode([token_id]))
        return string

    def token_strings(self, token_ids: Sequence[int], context: Sequence[int]) -> list[str]:
        """Return the text of each token after `context`, as vLLM shows the tokens of log-probabilities.

        A token that ends inside a character is ""; the one that completes the character has all of it.
        """
        strings = map(self.token_string, token_ids)
        return [
            self._completed(token_id, context) if string.endswith(HALF) else string
            for token_id, string in zip(token_ids, strings, strict=True)
        ]

    def _completed(self, token_id: int, context: Sequence[int]) -> str:
        """Return the character that a token completes together with the tokens of `context`, else ""."""
        if not context or not self.token_string(context[-1]).endswith(HALF):
            return ""
        for length in range(1, min(len(context), LONGEST_CHARACTER) + 1):
            before = list(context)[-length:]
            both = self._decode([*before, token_id])
            if both.endswith(HALF):
                continue
            while before and self.token_string(before[-1]).endswith(HALF):
                before.pop()
            return both.removeprefix(self._decode(before))
        return ""

    def _leading_spaces(self, token_id: int, string: str) -> str:
        """Return a token's text with the leading spaces that decoding drops at the beginning of a text."""
        piece = self._word_mark and self.backend.id_to_token(token_id)
        if not piece or not self._word_mark:
            return string
        num_marks = len(piece) - len(piece.lstrip(self._word_mark))
        return " " * (num_marks - (len(string) - len(string.lstrip(" ")))) + string

    @cached_property
    def _word_mark(self) -> str | None:
        """Return the character that stands for a space in a SentencePiece vocabulary; None for other tokenizers."""
        from tokenizers import pre_tokenizers

        splitter: Any = self.backend.pre_tokenizer
        splitters = splitter if isinstance(splitter, pre_tokenizers.Sequence) else [splitter]
        return next((each.replacement for each in splitters if isinstance(each, pre_tokenizers.Metaspace)), None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """The options for tokenizing prompts: `tokenization_kwargs`, checked and normalized."""

    add_special_tokens: bool | None = None
    """None adds them unless a chat template has written them."""
    keep: int | None = None
    """The maximum number of tokens to keep; None cuts nothing."""
    side: str | None = None
    """The side to cut, "left" or "right"; None is the tokenizer's."""

    def cut(self, token_ids: list[int], tokenizer: Tokenizer | None) -> list[int]:
        """Return the token ids to keep of a prompt."""
        if self.keep is None or len(token_ids) <= self.keep:
            return token_ids
        side = self.side or ("right" if tokenizer is None else tokenizer.parts.truncation_side)
        return cut_ids(token_ids, self.keep, side)


def cut_ids(token_ids: list[int], keep: int, side: str) -> list[int]:
    """Return at most `keep` of the token ids, cut on `side`, "left" or "right"."""
    return token_ids[max(0, len(token_ids) - keep) :] if side == "left" else token_ids[:keep]


def encode_options(kwargs: Mapping[str, Any] | None, max_model_len: int, *, outputs: int = 1) -> EncodeOptions:
    """Check tokenization_kwargs, for prompts with at least this many outputs. Raises VLLMValidationError for
    unsupported ones.
    """
    name = "tokenization_kwargs"
    options = check_options(name, kwargs)
    for key in options:
        if key not in _ENCODE_OPTIONS:
            message = f"{name} has no {key!r}; it takes {', '.join(_ENCODE_OPTIONS)}."
            raise VLLMValidationError(message, parameter=name, value=key)
    special, side = options.get("add_special_tokens"), options.get("truncation_side")
    if "add_special_tokens" in options:
        check_bool("add_special_tokens", special)
    check_choice("truncation_side", side, (None, "left", "right"))
    return EncodeOptions(special, _num_kept(options, max_model_len, outputs), side)


def _num_kept(options: Mapping[str, Any], max_model_len: int, outputs: int) -> int | None:
    """Return the number of prompt tokens to keep; -1, and truncation without a length, leave room for the outputs."""
    truncation, longest = options.get("truncation"), options.get("max_length")
    if not isinstance(truncation, bool):
        check_choice("truncation", truncation, (None, "longest_first", "do_not_truncate"))
    is_on = truncation in (True, "longest_first")
    name, keep = "truncate_prompt_tokens", options.get("truncate_prompt_tokens")
    if keep is None and is_on:
        name, keep = "max_length", -1 if longest is None else longest
    elif longest is not None and not is_on:
        message = "max_length goes with truncation=True; pass both, or truncate_prompt_tokens alone."
        raise VLLMValidationError(message, parameter="max_length", value=longest)
    elif keep is not None and truncation is not None:
        message = "truncate_prompt_tokens and truncation exclude each other; pass one of them."
        raise VLLMValidationError(message, parameter=name, value=keep)
    if keep is None:
        return None
    number = check_int(name, keep, -1, INT64_MAX, below="at least 1")
    if number > max_model_len:
        message = f"{name}={number} cannot be greater than max_model_len={max_model_len}."
        raise VLLMValidationError(f"{message} Please request a smaller truncation size.", parameter=name, value=keep)
    return max_model_len - outputs if number == -1 else check_int(name, number, 1, max_model_len)


def load_tokenizer(
    checkpoint: Checkpoint,
    cache_dir: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    hf_token: str | bool | None = None,
    download_dir: str | None = None,
) -> Tokenizer:
    """Load the checkpoint's tokenizer, or `name`: a folder, a .gguf file or a hub id.

    The result is cached under `cache_dir`, if its files can be identified. Raises VLLMValidationError.
    """
    if name is None:
        return _keep(cache_dir, checkpoint.tokenizer_digest(), checkpoint.tokenizer)
    return load_named_tokenizer(name, cache_dir, revision=revision, hf_token=hf_token, download_dir=download_dir)


def load_named_tokenizer(
    name: str,
    cache_dir: str,
    *,
    revision: str | None = None,
    hf_token: str | bool | None = None,
    download_dir: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a folder, a .gguf file or a hub id, as `load_tokenizer` does."""
    from jaxllm.loading.folder import tokenizer_digest
    from jaxllm.loading.open import open_checkpoint

    if name.endswith(".gguf"):
        other = open_checkpoint(name, sees=False)
        return _keep(cache_dir, other.tokenizer_digest(), other.tokenizer)
    # Only transformers knows which files of the hub it loads.
    digest = tokenizer_digest(Path(name)) if Path(name).is_dir() else None
    return _keep(cache_dir, digest, partial(_load_other, name, revision, hf_token, download_dir))


def _keep(cache_dir: str, digest: str | None, load_hf: Callable[[], PreTrainedTokenizerBase]) -> Tokenizer:
    """Return the tokenizer of a digest from the disk cache, else make and store it."""
    if digest is None:
        return Tokenizer.of(load_hf())
    from jaxllm.text.tokenizer_cache import TokenizerCache

    cache = TokenizerCache(cache_dir)
    kept = cache.load(digest)
    if kept is not None:
        return Tokenizer(kept, load_hf)
    tokenizer = Tokenizer.of(load_hf())
    cache.save(digest, tokenizer.parts)
    return tokenizer


def _load_other(
    name: str, revision: str | None, hf_token: str | bool | None, download_dir: str | None
) -> PreTrainedTokenizerBase:
    from jaxllm.loading.hf import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision or "main", token=hf_token, cache_dir=download_dir, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        message = f"tokenizer={name!r} cannot be loaded: {error}"
        raise VLLMValidationError(message, parameter="tokenizer", value=name) from error

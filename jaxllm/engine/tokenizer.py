"""A Hugging Face fast tokenizer, with what the engine needs around it: batches, single-token strings, the EOS id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.validation import INT32_MAX, check_bool, check_int

if TYPE_CHECKING:  # both cost import time
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

    from jaxllm.config import EngineConfig

_ENCODE_OPTIONS = ("add_special_tokens", "truncation", "max_length")


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, hf: PreTrainedTokenizerBase) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise VLLMValidationError(
                f"{type(hf).__name__} is not a fast tokenizer (it has no tokenizer.json); convert it first.",
                parameter="tokenizer",
                value=type(hf).__name__,
            )
        self.hf = hf
        self.backend: Backend = backend
        self._strings: dict[int, str] = {}

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a sequence."""
        eos = self.hf.eos_token_id
        return eos if isinstance(eos, int) else None

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The tokens that were added to the vocabulary as whole strings: special ones and others."""
        return {token_id: token.content for token_id, token in self.backend.get_added_tokens_decoder().items()}

    def encode(self, texts: Sequence[str], options: Mapping[str, Any] | None = None) -> list[list[int]]:
        """Turn texts into token ids; `options`: add_special_tokens (True), truncation (False), max_length."""
        if not texts:
            return []
        encoded = self.hf(
            list(texts),
            **{"add_special_tokens": True, **(options or {})},
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return encoded["input_ids"]

    def token_string(self, token_id: int) -> str:
        """Return the text of one token by itself; half a character shows as U+FFFD."""
        string = self._strings.get(token_id)
        if string is None:
            string = self._strings[token_id] = self.backend.decode([token_id], skip_special_tokens=False)
        return string


def check_encode_options(options: Mapping[str, Any] | None) -> None:
    """Refuse tokenization_kwargs that `Tokenizer.encode` cannot use."""
    for name, value in (options or {}).items():
        if name not in _ENCODE_OPTIONS:
            raise VLLMValidationError(
                f"tokenization_kwargs has no {name!r}; it takes {', '.join(_ENCODE_OPTIONS)}.",
                parameter="tokenization_kwargs",
                value=name,
            )
        if name != "max_length":
            check_bool(name, value)
        elif value is not None:
            check_int(name, value, 1, INT32_MAX)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the tokenizer that the config asks for: the checkpoint's own, another, or none."""
    if config.skip_tokenizer_init:
        return None
    from jaxllm.loading.checkpoint import open_checkpoint

    if config.tokenizer is None or (config.tokenizer == config.model and config.tokenizer_revision is None):
        return Tokenizer(config.checkpoint.tokenizer())
    if config.tokenizer.endswith(".gguf"):
        return Tokenizer(open_checkpoint(config.tokenizer).tokenizer())
    from jaxllm.loading.hf import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(
            config.tokenizer,
            revision=config.tokenizer_revision or "main",
            token=config.hf_token,
            cache_dir=config.download_dir,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        message = f"tokenizer={config.tokenizer!r} cannot be loaded: {error}"
        raise VLLMValidationError(message, parameter="tokenizer", value=config.tokenizer) from error
    return Tokenizer(hf)

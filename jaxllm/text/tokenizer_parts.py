"""A tokenizer as plain data, to send between processes and to keep on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerParts(msgspec.Struct, frozen=True):
    """The parts of a tokenizer, chat templates included, which need no transformers."""

    tokenizer_json: bytes
    """The tokenizers library's form, as in tokenizer.json: tens of megabytes, parsed when needed."""
    eos_token_id: int | None = None
    chat_template: str | dict[str, str] | None = None
    """One template, or several by name."""
    special_tokens: dict[str, str] = {}
    """The special tokens' texts for chat templates by name, as "bos_token"."""
    truncation_side: Literal["left", "right"] = "right"
    split_special_tokens: bool = False
    """Whether special tokens within a text are read as plain text."""

    @classmethod
    def of(cls, hf: PreTrainedTokenizerBase) -> TokenizerParts:
        """Take a transformers tokenizer apart. Raises VLLMValidationError for a slow one."""
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise VLLMValidationError(
                f"{type(hf).__name__} is not a fast tokenizer (it has no tokenizer.json); convert it first.",
                parameter="tokenizer",
                value=type(hf).__name__,
            )
        return cls(
            backend.to_str().encode(),
            hf.eos_token_id if isinstance(hf.eos_token_id, int) else None,
            hf.chat_template,
            hf.special_tokens_map,
            "left" if hf.truncation_side == "left" else "right",
            bool(getattr(hf, "split_special_tokens", False)),
        )

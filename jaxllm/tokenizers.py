"""vLLM's import path for the function that loads a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def get_tokenizer(
    tokenizer_name: str | Path,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer of a folder, a .gguf file or a hub id.

    The modes are those of an engine's `tokenizer_mode`; all of them read tokenizer.json. The `options` go to
    transformers. Raises VLLMValidationError for remote code, for other modes, and for options of a .gguf file.
    """
    if trust_remote_code:
        message = "trust_remote_code=True is not supported: no code of a model is run. Leave it out."
        raise VLLMValidationError(message, parameter="trust_remote_code", value=True)
    check_choice("tokenizer_mode", tokenizer_mode, ("auto", "hf", "fast", "mistral"))
    name = str(tokenizer_name)
    if not name.endswith(".gguf"):
        from jaxllm.loading.hf import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, revision=revision, cache_dir=download_dir, **options)
    if options:
        message = f"a .gguf file settles how its tokenizer works: leave out {', '.join(options)}."
        raise VLLMValidationError(message, parameter=next(iter(options)))
    from jaxllm.loading.open import open_checkpoint

    return open_checkpoint(name, sees=False).tokenizer()

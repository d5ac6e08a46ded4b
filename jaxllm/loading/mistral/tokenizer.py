"""Make a tokenizer of tekken.json, Mistral's own vocabulary, with transformers' converter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEKKEN_NAME = "tekken.json"


def tekken_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a tekken.json, which starts texts with <s>.

    The chat template is the folder's chat_template.jinja; without one, it is made by mistral-common, if installed.
    """
    from tokenizers import processors
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    tokenizer = convert_tekken_tokenizer(str(path))
    bos = tokenizer.bos_token
    start = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    offsets = processors.ByteLevel(trim_offsets=False)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([offsets, start])
    return tokenizer

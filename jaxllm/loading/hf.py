"""What jaxllm uses of transformers, without its notice that PyTorch is missing: jaxllm never needs it. Import late."""

from __future__ import annotations

import logging

logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402 (the notice comes with the import)

__all__ = ["AutoTokenizer", "PreTrainedTokenizerFast"]

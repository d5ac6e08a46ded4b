"""jaxllm uses this of transformers, without the notice that PyTorch is missing, which it never needs. Import late."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

from transformers import PreTrainedTokenizerFast  # noqa: E402 (the notice comes with the import)

if TYPE_CHECKING:
    from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

__all__ = ["AutoConfig", "AutoTokenizer", "PreTrainedConfig", "PreTrainedTokenizerFast"]


def __getattr__(name: str) -> Any:
    """Import the others when they are asked for: AutoTokenizer brings PyTorch along wherever that is installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers

    return getattr(transformers, name)

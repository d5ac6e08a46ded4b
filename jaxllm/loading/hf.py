"""The names that jaxllm uses of transformers, imported without its warning that PyTorch is missing. Import late.

Nor does it warn of small images: their channels come first, as it assumes.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

_NEEDLESS = ("PyTorch was not found", "channel dimension is ambiguous")
_is_needed = lambda record: not any(text in record.getMessage() for text in _NEEDLESS)  # noqa: E731
logging.getLogger("transformers").addFilter(_is_needed)
logging.getLogger("transformers.image_utils").addFilter(_is_needed)

from transformers import PreTrainedTokenizerFast  # noqa: E402 (the notice comes with the import)

if TYPE_CHECKING:
    from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

__all__ = ["AutoConfig", "AutoTokenizer", "PreTrainedConfig", "PreTrainedTokenizerFast"]


def class_names(model_type: str, *, is_wrapper: bool) -> list[str]:
    """Return the names of HF's classes for a model type, generating classes first; [] for an unknown type."""
    # The package itself exports these names only where PyTorch is installed.
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    generating = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if is_wrapper else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    entries = [names[model_type] for names in (generating, MODEL_MAPPING_NAMES) if model_type in names]
    return [name for each in entries for name in ([each] if isinstance(each, str) else each)]


def image_processor_class(family: str, name: str) -> Any:
    """Return HF's image processor of a name that works with Pillow, from the folder of a family of models."""
    return getattr(import_module(f"transformers.models.{family}.image_processing_pil_{family}"), name)


def __getattr__(name: str) -> Any:
    """Import the remaining names on first use: AutoTokenizer imports PyTorch wherever that is installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers

    return getattr(transformers, name)

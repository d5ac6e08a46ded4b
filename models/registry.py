"""Which family serves which HF architecture. A new family is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType

from .family import Family

# "module:attribute", imported on first use.
BUILT_IN = MappingProxyType(
    {
        "LlamaForCausalLM": "llama:LLAMA",
        "MistralForCausalLM": "mistral:MISTRAL",
        "Mistral3ForConditionalGeneration": "mistral:MISTRAL3",
        "Qwen2ForCausalLM": "qwen2:QWEN2",
        "Qwen3ForCausalLM": "qwen3:QWEN3",
        "Gemma2ForCausalLM": "gemma2:GEMMA2",
        "Gemma3ForCausalLM": "gemma3:GEMMA3",
        "Gemma3ForConditionalGeneration": "gemma3:GEMMA3_MULTIMODAL",
    }
)

# The one place that outside code extends, hence the mutable state.
_registered: dict[str, Family] = {}


def get_family(architecture: str) -> Family:
    """Return the family of an HF architecture name; an unknown name raises ValueError that lists the known ones."""
    if architecture in _registered:
        return _registered[architecture]
    if architecture not in BUILT_IN:
        known = ", ".join(supported_architectures())
        raise ValueError(f"architecture {architecture!r} is not supported; there are {known} (register_model adds one)")
    module, attribute = BUILT_IN[architecture].split(":")
    return getattr(import_module(f".{module}", __package__), attribute)


def is_built_in(architecture: str) -> bool:
    """Say whether an architecture's family is ours, and no other was registered in its place."""
    return architecture in BUILT_IN and architecture not in _registered


def register_model(architecture: str, family: Family) -> None:
    """Add an architecture, or replace one; TypeError or ValueError if it is no Family, or does not name the embedding.

    `architecture` is what a config.json says; the family's own config function may name another one.
    """
    if not isinstance(family, Family):
        raise TypeError(f"register_model({architecture!r}): expected a Family, got {type(family).__name__}")
    if "embed.table" not in family.names:
        raise ValueError(f"register_model({architecture!r}): the family's names lack 'embed.table'")
    _registered[architecture] = family


def supported_architectures() -> tuple[str, ...]:
    """Return all architecture names that `get_family` knows, sorted."""
    return tuple(sorted({*BUILT_IN, *_registered}))

"""The families of models by HF architecture: those that the modules of `families` declare, and users' own.

The family of a decoder also gives the families of the models that pool around it.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from functools import cached_property
from importlib import import_module
from types import MappingProxyType

from . import families
from .families.missing import MISSING
from .family import Family
from .pooling import as_classifier, as_embedder, as_token_classifier

_POOLED = MappingProxyType(
    {
        "Model": as_embedder,
        "ForSequenceClassification": as_classifier,
        "ForTokenClassification": as_token_classifier,
    }
)
"""The functions that make a family of pooling models of a family of decoders, by the end of the architecture's name."""
_DECODER = re.compile(r"(.+)(ForCausalLM|LMHeadModel)")
_ALIKE = 0.6
"""The least similarity of two names, from 0 to 1, at which one is suggested for the other."""


class _Registry:
    """The families by architecture: the built-in ones, and those that users add."""

    def __init__(self) -> None:
        self._added: dict[str, Family | str] = {}

    @cached_property
    def _built_in(self) -> Mapping[str, Family]:
        """Import the modules of `families`, and return the entries of their `FAMILIES`."""
        names = [f"{families.__name__}.{name}" for _, name, _ in pkgutil.iter_modules(families.__path__)]
        modules = [import_module(name) for name in names]
        return {name: family for module in modules for name, family in getattr(module, "FAMILIES", {}).items()}

    def get_family(self, architecture: str) -> Family:
        """Return the family of an HF architecture name; an unknown one raises ValueError.

        The message has what is missing for it (`missing.py`), or the nearest one that is known.

        `*Model`, `*ForSequenceClassification` and `*ForTokenClassification` follow from the decoder of that name. A
        family that was registered by name is imported now: ValueError if that fails, or finds no family.
        """
        if architecture in self._added:
            family = self._added[architecture]
            return _import_family(architecture, family) if isinstance(family, str) else family
        if architecture in (derived := self._derived()):
            decoder, make = derived[architecture]
            return make(self.get_family(decoder))
        if architecture not in self._built_in:
            known = self.supported_architectures()
            raise ValueError(
                f"architecture {architecture!r} is not supported{self._hint(architecture)} "
                f"(jaxllm.models.supported_architectures() lists all {len(known)}, jaxllm.register_model adds one)"
            )
        return self._built_in[architecture]

    def _hint(self, architecture: str) -> str:
        """Return what is missing for an architecture that is not supported, or else the nearest one that is."""
        if architecture in MISSING:
            return f": it needs {MISSING[architecture]}"
        nearest = _nearest(architecture, (*self._built_in, *self._added))
        return f"; nearest to it is {nearest}" if nearest else ""

    def is_built_in(self, architecture: str) -> bool:
        """Return whether an architecture's family is built in, and no other was registered in its place."""
        decoder, _ = self._derived().get(architecture, (architecture, None))
        return decoder in self._built_in and not {architecture, decoder} & self._added.keys()

    def register_model(self, architecture: str, family: Family | str) -> None:
        """Add an architecture, or replace one; TypeError or ValueError if it is no Family, or names no embedding.

        `architecture` is the name in a config.json; the family's config function may return another one. `family` may
        be a name, "module:FAMILY", which is imported when a model of that architecture is loaded.
        """
        if isinstance(family, str):
            _split(architecture, family)
        else:
            _check(architecture, family)
        self._added[architecture] = family

    def supported_architectures(self) -> tuple[str, ...]:
        """Return all architecture names that `get_family` knows, sorted."""
        return tuple(sorted({*self._built_in, *self._added, *self._derived()}))

    def get_supported_archs(self) -> frozenset[str]:
        """Return the same under vLLM's name, and as a set."""
        return frozenset(self.supported_architectures())

    def _derived(self) -> dict[str, tuple[str, Callable[[Family], Family]]]:
        """Return the decoder, and the function to apply to it, for each architecture that follows from a decoder.

        The names are HF's: a family that replaces a built-in one gives the same ones.
        """
        known = {**self._built_in, **self._added}
        derived: dict[str, tuple[str, Callable[[Family], Family]]] = {}
        for decoder, family in known.items():
            if match := _DECODER.fullmatch(decoder):
                named = self._built_in.get(decoder, family)
                stem = f"{match[1]}Text" if isinstance(named, Family) and named.is_text_part else match[1]
                derived |= {stem + end: (decoder, make) for end, make in _POOLED.items() if stem + end not in known}
        return derived


def _nearest(architecture: str, known: tuple[str, ...]) -> str | None:
    """Return the known architecture with the most similar model name, or None if none is similar."""

    def likeness(other: str) -> tuple[float, float]:
        return _ratio(_model_name(architecture), _model_name(other)), _ratio(architecture, other)

    best = max(known, key=likeness)
    return best if likeness(best)[0] >= _ALIKE else None


def _model_name(architecture: str) -> str:
    """Return the part of an architecture before the kind of head, which many architectures share."""
    return re.split("For|LMHead|Model", architecture, maxsplit=1)[0].lower()


def _ratio(name: str, other: str) -> float:
    return SequenceMatcher(None, name, other).ratio()


def _split(architecture: str, name: str) -> tuple[str, str]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"register_model({architecture!r}): {name!r} is not 'module:FAMILY'")
    return module, attribute


def _import_family(architecture: str, name: str) -> Family:
    module, attribute = _split(architecture, name)
    try:
        family = getattr(import_module(module), attribute)
        _check(architecture, family)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{name!r} gives no family: {type(error).__name__}: {error}") from error
    return family


def _check(architecture: str, family: object) -> None:
    if not isinstance(family, Family):
        raise TypeError(f"register_model({architecture!r}): expected a Family, got {type(family).__name__}")
    if "embed.table" not in family.names:
        raise ValueError(f"register_model({architecture!r}): the family's names lack 'embed.table'")


REGISTRY = _Registry()
"""The registry of the process: users add a family before they make an engine, so no engine can own it."""

ModelRegistry = REGISTRY
"""vLLM's name for the registry."""
get_family = REGISTRY.get_family
is_built_in = REGISTRY.is_built_in
register_model = REGISTRY.register_model
supported_architectures = REGISTRY.supported_architectures

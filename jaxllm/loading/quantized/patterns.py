"""Match modules against the lists in configs: by name, by part of a name, or by regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

_PLAIN = frozenset(("gate", "router", "shared_expert_gate", "wte", "wpe", "lm_head"))
_UP_TO_A_DOT = r"(?:{})(?:(?<=\.)|(?=\.|$))"


def compiled(pattern: str, key: str, around: str = "{}") -> re.Pattern[str]:
    """Compile a config's regular expression within a larger one. Raises ValueError with its key if it is invalid."""
    try:
        return re.compile(around.format(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        message = f"quantization_config: {key} has {pattern[:100]!r}, which is no regular expression: {error}"
        raise ValueError(message) from None


def is_seldom_quantized(module: str) -> bool:
    """Return whether tools leave a module unquantized by default: a norm, embedding, router or head."""
    last = module.rpartition(".")[2]
    return last in _PLAIN or "norm" in last or "embed" in last or last.startswith("ln_")


class SkipList:
    """The modules that a tool left unquantized, with transformers' rules for `modules_to_not_convert`.

    An entry is the start of a name up to a dot, the end of a name, or a regular expression of the start.
    """

    def __init__(self, entries: Iterable[str], key: str) -> None:
        entries = list(entries)
        self._names = frozenset(entry.removesuffix(".") for entry in entries)
        self._ends = tuple(entries)
        self._key = key

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        others = [entry for entry in self._ends if not re.fullmatch(r"[\w.\-]*", entry)]
        return [compiled(entry, self._key, _UP_TO_A_DOT) for entry in others]

    def check(self) -> None:
        """Raise ValueError if an entry is not a regular expression."""
        _ = self._patterns

    def __contains__(self, module: object) -> bool:
        if not isinstance(module, str):
            return False
        parts = module.split(".")
        starts = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return (
            module.endswith(self._ends)
            or any(start in self._names for start in starts)
            or any(pattern.match(module) for pattern in self._patterns)
        )

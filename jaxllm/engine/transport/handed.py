"""Values that are handed over to a core in a thread of this process: messages carry their numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from jaxllm.exceptions import VLLMValidationError

_VALUES: dict[int, Any] = {}
_NUMBERS = itertools.count()


@contextlib.contextmanager
def handed(value: Any) -> Iterator[int]:
    """Yield a number that stands for a value in this process until the block ends."""
    number = next(_NUMBERS)
    _VALUES[number] = value
    try:
        yield number
    finally:
        del _VALUES[number]


def value_of(number: int) -> Any:
    """Return the value of a number. Raises VLLMValidationError if its block has ended, as for a cancelled call."""
    if number not in _VALUES:
        raise VLLMValidationError("what was handed over to the core was taken back.", parameter="weights")
    return _VALUES[number]

"""Values that are handed over to a core in a thread of this process: messages carry their numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from jaxllm.exceptions import VLLMValidationError


class Handover:
    """The values by number. Any thread may use it."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def hand(self, value: Any) -> Iterator[int]:
        """Yield a number that stands for a value until the block ends."""
        number = next(self._numbers)
        self._values[number] = value
        try:
            yield number
        finally:
            del self._values[number]

    def value(self, number: int) -> Any:
        """Return the value of a number. Raises VLLMValidationError if its block has ended, as for a cancelled call."""
        if number not in self._values:
            raise VLLMValidationError("what was handed over to the core was taken back.", parameter="weights")
        return self._values[number]


HANDOVER = Handover()
"""What the front ends of this process hand over."""

"""An object that may be used as it is, or awaited first."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Self


class _Awaitable:
    """The first base of the classes that `awaitable` makes; the second is what the object was."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield  # what makes this a generator

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies and pickles be what the object was: the class that was made cannot be imported."""
        _, (_, *arguments), *rest = super().__reduce_ex__(protocol)
        return _make, (type(self).__mro__[2], *arguments), *rest


def _make(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def awaitable[T](value: T) -> T:
    """Return an object after making it one of which `await` gives the object itself.

    Methods that were asynchronous once serve both kinds of callers so. Its class becomes a subclass of the same name.
    """
    kind = type(value)
    if not issubclass(kind, _Awaitable):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        object.__setattr__(value, "__class__", type(kind.__name__, (_Awaitable, kind), names))
    return value

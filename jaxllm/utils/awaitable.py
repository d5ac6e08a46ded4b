"""Make an object awaitable: `await x` returns `x`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Self


class _Awaitable:
    """First base of the classes that `awaitable` makes; the second base is the object's own class."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield  # makes this method a generator

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the object as its original class: the new class cannot be imported."""
        _, (_, *arguments), *rest = super().__reduce_ex__(protocol)
        return _make, (type(self).__mro__[2], *arguments), *rest


def _make(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def awaitable[T](value: T) -> T:
    """Return the object, changed so that `await` on it returns the object itself.

    A method that used to be asynchronous then works with and without `await`. The object's class becomes a subclass of
    the same name.
    """
    kind = type(value)
    if not issubclass(kind, _Awaitable):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        object.__setattr__(value, "__class__", type(kind.__name__, (_Awaitable, kind), names))
    return value

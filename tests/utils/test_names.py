"""Functions and classes by name: what a name stands for, and what no name leads back to."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest

import __main__
from jaxllm.utils.names import import_name, name_of


class Outer:
    """A class at the top of a module."""

    class Inner:
        """A class in a class."""

        def method(self) -> None:
            """Do nothing."""


@functools.wraps(import_name)
def in_disguise(name: str) -> Any:
    return import_name(name)


@functools.cache
def wrapped() -> int:
    return 3


INSTANCE = Outer()


@pytest.mark.parametrize("thing", [Outer, Outer.Inner, Outer.Inner.method, wrapped, collections.OrderedDict, len])
def test_a_name_leads_back(thing: Any):
    name = name_of(thing)
    assert name.count(":") == 1
    assert import_name(name) is thing


def test_a_name_may_do_without_the_colon():
    assert import_name("collections.OrderedDict") is import_name("collections:OrderedDict") is collections.OrderedDict


def made_in_a_function() -> Any:
    def inner() -> None:
        pass

    return inner


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (lambda: None, "a lambda, or made in a function"),
        (made_in_a_function(), "a lambda, or made in a function"),
        (INSTANCE, "neither a function nor a class"),
        (functools.partial(import_name, "a:b"), "neither a function nor a class"),
        (INSTANCE.__init__, "neither a function nor a class"),
        (Outer.Inner().method, "stands for another object"),
        (in_disguise, "'jaxllm.utils.names:import_name' stands for another object"),
        (type("Lost", (), {"__module__": __name__}), "has no 'Lost'"),
        (3, "neither a function nor a class"),
    ],
)
def test_what_has_no_name(thing: Any, reason: str):
    with pytest.raises(ImportError, match=reason):
        name_of(thing)


def test_the_main_program_is_not_imported_elsewhere(monkeypatch: pytest.MonkeyPatch):
    mine = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.setattr(__main__, "Mine", mine, raising=False)
    assert import_name("__main__:Mine") is mine
    with pytest.raises(ImportError, match="main program"):
        name_of(mine)

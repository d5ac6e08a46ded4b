"""Functions and classes go by name from one process to another: "module:name", or "module.name"."""

from __future__ import annotations

import importlib
from typing import Any


def import_name(name: str) -> Any:
    """Return what "module:name" or "module.name" stands for; after a colon the name may be dotted itself.

    Raises ImportError, which says what is wrong with the name, whatever the module raises when it is imported.
    """
    module_name, separator, attributes = name.partition(":")
    if not separator:
        module_name, _, attributes = name.rpartition(".")
    if not module_name or not attributes:
        raise ImportError(f"{name[:200]!r} is not 'module:name'")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ImportError(f"cannot import {module_name[:200]!r}: {type(error).__name__}: {error}") from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ImportError(f"{module_name[:200]!r} has no {attribute[:200]!r}")
        found = getattr(found, attribute)
    return found


def name_of(thing: Any) -> str:
    """Return the "module:name" that stands for a function or class in any process.

    Raises ImportError, which says why, where none does: for lambdas, what is made in functions or defined in the main
    program, and for other objects.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ImportError("it is neither a function nor a class")
    if module == "__main__":
        raise ImportError("it is defined in the main program, which another process does not import")
    if "<" in name:
        raise ImportError("it is a lambda, or made in a function")
    if import_name(f"{module}:{name}") is not thing:
        raise ImportError(f"'{module}:{name}' stands for another object")
    return f"{module}:{name}"

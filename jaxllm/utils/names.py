"""Convert functions and classes to names that other processes can import: "module:name" or "module.name"."""

from __future__ import annotations

import importlib
from typing import Any


def import_name(name: str) -> Any:
    """Return the object called "module:name" or "module.name"; after a colon the name may contain dots.

    Raises ImportError with the reason, whatever the module raises when it is imported.
    """
    module_name, separator, attributes = name.partition(":")
    if not separator:
        module_name, _, attributes = name.rpartition(".")
    if not module_name or not attributes:
        raise ImportError(f"{name[:200]!r} is not 'module:name'")
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ImportError(f"cannot import {module_name[:200]!r}: {type(error).__name__}: {error}") from error
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            raise ImportError(f"{module_name[:200]!r} has no {attribute[:200]!r}")
        value = getattr(value, attribute)
    return value


def name_of(thing: Any) -> str:
    """Return the "module:name" of a function or class, valid in any process.

    Raises ImportError with the reason for objects without such a name: lambdas, local functions and classes, those of
    the main program, and instances.
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

"""Read typed fields of a config.json. Missing or malformed ones raise ValueError with the field's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MAX_INT = 2**31 - 1


def read_int(
    values: Mapping[str, Any], name: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INT
) -> int:
    """Return an integer in [minimum, maximum]; `default` stands in for a field that is missing or null."""
    value = _required(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, expected an integer")
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value}, expected {minimum} to {maximum}")
    return value


def read_float(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive finite number; `default` stands in for a field that is missing or null."""
    value = _required(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, expected a number")
    if not 0 < value < math.inf or value > 1e30:
        raise ValueError(f"{name} is {value}, expected a positive number")
    return float(value)


def read_floats(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """Return a list of positive finite numbers."""
    numbers = _required(values, name, None)
    if not isinstance(numbers, list | tuple):
        raise ValueError(f"{name} is {numbers!r}, expected a list of numbers")
    return tuple(read_float({name: value}, name) for value in numbers)


def read_optional_int(values: Mapping[str, Any], name: str) -> int | None:
    """Return a positive integer, or None for a field that is missing or null."""
    return None if values.get(name) is None else read_int(values, name)


def read_optional_float(values: Mapping[str, Any], name: str) -> float | None:
    """Return a positive finite number, or None for a field that is missing or null."""
    return None if values.get(name) is None else read_float(values, name)


def read_bool(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a boolean; `default` stands in for a field that is missing or null."""
    value = _required(values, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected true or false")
    return value


def read_choice(values: Mapping[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    """Return one of several strings; `default` stands in for a field that is missing."""
    value = values.get(name, default)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, which is not supported, only {', '.join(choices)}")
    return value


def read_ints(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a list of non-negative integers, empty for a field that is missing or null."""
    numbers = values.get(name)
    if numbers is None:
        return ()
    if not isinstance(numbers, list | tuple) or not all(
        type(each) is int and 0 <= each <= _MAX_INT for each in numbers
    ):
        raise ValueError(f"{name} is {numbers!r}, expected a list of integers")
    return tuple(numbers)


def read_mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object, empty for a field that is missing or null."""
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}, expected an object")
    return dict(value)


def require(values: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError for fields with other values than these; missing or null fields pass."""
    for name, value in expected.items():
        stored = values.get(name)
        if stored is not None and (stored != value or type(stored) is not type(value)):
            raise ValueError(f"{name} is {stored!r}; only {value!r} is supported in this architecture")


def _required(values: Mapping[str, Any], name: str, default: Any) -> Any:
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise ValueError(f"{name} is missing")
    return value

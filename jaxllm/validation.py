"""Checks of single values, shared by every class that takes user input. Each returns the plain Python value."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.exceptions import VLLMValidationError

INT32_MAX = 2**31 - 1


def shown(value: object) -> str:
    """Show a user's value in an error, briefly whatever its size."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:60]!r}... ({len(value)} characters)"
    if isinstance(value, Collection):
        return f"{type(value).__name__} of {len(value)}" if len(value) > 8 else repr(value)[:80]
    return repr(value)[:80]


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` as an int in [low, high]; booleans and floats are refused."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise VLLMValidationError(
                f"{name} must be an integer, got {shown(value)} ({type(value).__name__}).", parameter=name, value=value
            )
        value = operator.index(value)
    if value < low:
        raise VLLMValidationError(f"{name} must be at least {low}, got {shown(value)}.", parameter=name, value=value)
    if value > high:
        raise VLLMValidationError(f"{name} must be at most {high}, got {shown(value)}.", parameter=name, value=value)
    return value


def check_float(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """Return `value` as a finite float in [low, high], or in (low, high] when `above_low`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise VLLMValidationError(
            f"{name} must be a number, got {shown(value)} ({type(value).__name__}).", parameter=name, value=value
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise VLLMValidationError(f"{name} must be a finite number, got {shown(value)}.", parameter=name, value=value)
    if not low <= number <= high or (above_low and number == low):
        wanted = f"{'(' if above_low else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
        raise VLLMValidationError(f"{name} must be in {wanted}, got {shown(value)}.", parameter=name, value=value)
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; 0, 1 and strings are refused."""
    if not isinstance(value, bool):
        raise VLLMValidationError(f"{name} must be True or False, got {shown(value)}.", parameter=name, value=value)
    return value


def check_str(name: str, value: Any, max_length: int) -> str:
    """Return `value` if it is a non-empty string of at most `max_length` characters."""
    if not isinstance(value, str):
        raise VLLMValidationError(
            f"{name} must be a string, got {shown(value)} ({type(value).__name__}).", parameter=name, value=value
        )
    if not value:
        raise VLLMValidationError(f"{name} cannot contain an empty string.", parameter=name, value=value)
    if len(value) > max_length:
        raise VLLMValidationError(
            f"{name} must have at most {max_length} characters, got {len(value)}.", parameter=name, value=value
        )
    return value


def check_strings(name: str, value: Any, max_count: int, max_length: int) -> list[str]:
    """Return the distinct strings of `value` in order; each is non-empty and at most `max_length` long."""
    items = _check_collection(name, value, max_count)
    return list(dict.fromkeys(check_str(name, item, max_length) for item in items))


def check_ints(name: str, value: Any, low: int, high: int, max_count: int) -> list[int]:
    """Return the distinct integers of `value` in order; each is in [low, high]."""
    items = _check_collection(name, value, max_count)
    return list(dict.fromkeys(check_int(name, item, low, high) for item in items))


def check_choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    """Return `value` if it is one of `choices`."""
    if isinstance(value, (str, int, type(None))) and value in choices:
        return value
    listed = ", ".join(str(choice) for choice in choices)
    raise VLLMValidationError(f"{name} must be one of {listed}; got {shown(value)}.", parameter=name, value=value)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Refuse a `value` that is neither None nor a `kind`."""
    if value is not None and not isinstance(value, kind):
        raise VLLMValidationError(
            f"{name} must be a {kind.__name__}, got {shown(value)} ({type(value).__name__}).",
            parameter=name,
            value=value,
        )


def _check_collection(name: str, value: Any, max_count: int) -> Collection[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        raise VLLMValidationError(
            f"{name} must be a list, got {shown(value)} ({type(value).__name__}).", parameter=name, value=value
        )
    if len(value) > max_count:
        raise VLLMValidationError(
            f"{name} must have at most {max_count} entries, got {len(value)}.", parameter=name, value=value
        )
    return value

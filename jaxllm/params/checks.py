"""Check single values of user input, and return them as plain Python values."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from jaxllm.exceptions import VLLMValidationError

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class _Brief(reprlib.Repr):
    """Make a short `repr` of any value at a bounded cost."""

    def repr_int(self, x: int, level: int) -> str:
        """Show an integer, shortened if long: Python refuses to print very long ones."""
        del level
        return f"an integer of {x.bit_length()} bits" if x.bit_length() > 256 else repr(x)


def shown(value: object) -> str:
    """Return a short form of a user's value for an error message."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:60]!r}... ({len(value)} characters)"
    if has_length(value) and len(value) > 8:
        return f"{type(value).__name__} of {len(value)}"
    brief = _Brief()
    brief.maxlevel = 2
    text = brief.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def check_int(
    name: str, value: Any, low: int, high: int, *, parameter: str | None = None, below: str | None = None
) -> int:
    """Return `value` as an int in [low, high]; booleans and floats are refused.

    Errors name `parameter`, or `name`. `below` is the message's wording for a value less than `low`.
    """
    parameter = parameter or name
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            message = f"{name} must be an integer, got {shown(value)} ({type(value).__name__})."
            raise VLLMValidationError(message, parameter=parameter, value=value)
        value = operator.index(value)
    if not low <= value <= high:
        wanted = (below or f"at least {low}") if value < low else f"at most {high}"
        raise VLLMValidationError(f"{name} must be {wanted}, got {shown(value)}.", parameter=parameter, value=value)
    return value


def check_float(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    above_low: bool = False,
    parameter: str | None = None,
    below: str | None = None,
) -> float:
    """Return `value` as a finite float in [low, high], or in (low, high] when `above_low`; errors as in check_int."""
    parameter = parameter or name
    number = value
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            message = f"{name} must be a number, got {shown(value)} ({type(value).__name__})."
            raise VLLMValidationError(message, parameter=parameter, value=value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        message = f"{name} must be a finite number, got {shown(value)}."
        raise VLLMValidationError(message, parameter=parameter, value=value)
    if not low <= number <= high or (above_low and number == low):
        wanted = f"in {'(' if above_low else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
        wanted = below if below and number < low else wanted
        raise VLLMValidationError(f"{name} must be {wanted}, got {shown(value)}.", parameter=parameter, value=value)
    return number


def check_bool(name: str, value: Any, *, parameter: str | None = None) -> bool:
    """Return `value` if it is True or False; 0, 1 and strings are refused. Errors name `parameter`, or `name`."""
    if not isinstance(value, bool):
        message = f"{name} must be True or False, got {shown(value)}."
        raise VLLMValidationError(message, parameter=parameter or name, value=value)
    return value


def check_str(name: str, value: Any, max_length: int, *, parameter: str | None = None) -> str:
    """Return `value` if it is a non-empty string of at most `max_length` characters; errors as in check_bool."""
    if not isinstance(value, str):
        message = f"{name} must be a string, got {shown(value)} ({type(value).__name__})."
    elif not value:
        message = f"{name} cannot contain an empty string."
    elif len(value) > max_length:
        message = f"{name} must have at most {max_length} characters, got {len(value)}."
    elif not is_unicode(value):
        message = f"{name} must be Unicode text: {shown(value)} has lone surrogates."
    else:
        return str(value)  # NumPy's strings are str too, but cannot be encoded
    raise VLLMValidationError(message, parameter=parameter or name, value=value)


def is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogates, which no tokenizer or encoding accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_strings(name: str, value: Any, max_count: int, max_length: int) -> list[str]:
    """Return the distinct strings of `value` in order; each is non-empty and at most `max_length` long."""
    items = _check_collection(name, value, max_count)
    return list(dict.fromkeys(check_str(name, item, max_length) for item in items))


def check_ints(name: str, value: Any, low: int, high: int, max_count: int) -> list[int]:
    """Return the distinct integers of `value` in order; each is in [low, high]."""
    items: Any = _check_collection(name, value, max_count)
    if hasattr(items, "tolist"):
        items = items.tolist()  # numpy's integers are slow to look at one by one
    # Hundreds of thousands of ids are allowed: a call of check_int for each would take too long.
    if set(map(type, items)) == {int} and min(items) >= low and max(items) <= high:
        return list(dict.fromkeys(items))
    strange = next((item for item in items if isinstance(item, bool) or not isinstance(item, numbers.Integral)), None)
    if strange is not None:
        message = f"{name} must contain only integers, got {shown(strange)} ({type(strange).__name__})."
        raise VLLMValidationError(message, parameter=name, value=strange)
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


def check_options(name: str, value: Any) -> dict[str, Any]:
    """Return a dict of keyword arguments; None gives an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        message = f"{name} must be a dict with strings as keys, got {shown(value)} ({type(value).__name__})."
        raise VLLMValidationError(message, parameter=name, value=value)
    return dict(value)


def _check_collection(name: str, value: Any, max_count: int) -> Collection[Any]:
    if type(value) is not list and (isinstance(value, (str, bytes, Mapping)) or not has_length(value)):
        raise VLLMValidationError(
            f"{name} must be a list, got {shown(value)} ({type(value).__name__}).", parameter=name, value=value
        )
    if len(value) > max_count:
        raise VLLMValidationError(
            f"{name} must have at most {max_count} entries, got {len(value)}.", parameter=name, value=value
        )
    return value


def has_length(value: object) -> TypeGuard[Collection[Any]]:
    """Return whether a value is a collection; an array without dimensions is none, though it has `__len__`."""
    return isinstance(value, Collection) and getattr(value, "shape", None) != ()

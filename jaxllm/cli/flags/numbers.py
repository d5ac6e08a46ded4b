"""Argument types for numbers: each function parses a text, or raises an error with the expected form."""

from __future__ import annotations

import argparse
import math

from jaxllm.utils.argparse_utils import human_readable_int


def positive(text: str) -> int:
    """Parse an integer of 1 or more, which may be written as 4k."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """Parse an integer of 0 or more, which may be written as 4k."""
    return _integer(text, 0)


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def above_zero(text: str) -> float:
    """Parse a number above 0, inf included."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def seconds(text: str) -> float:
    """Parse a finite number of 0 or more."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _integer(text: str, low: int) -> int:
    try:
        value = human_readable_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < low:
        raise argparse.ArgumentTypeError(f"{text} is less than {low}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from error

"""Read typed fields of a quantization_config. A wrong value is a ValueError with its key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.params.checks import shown

MAX_NAMES = 100_000
_MAX_NAME = 1000
_MAX_INT = 1 << 20


def read_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer of at least -1; `default` if it is missing or null."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not -1 <= value <= _MAX_INT:
        raise ValueError(f"quantization_config: {key} is {shown(value)}, expected a number")
    return value


def read_bool(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean; `default` if it is missing or null."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"quantization_config: {key} is {shown(value)}, expected true or false")
    return value


def read_choice[T: (str, int)](config: Mapping[str, Any], key: str, choices: Collection[T], default: T) -> T:
    """Return a value that must be one of `choices`; `default` if it is missing or null."""
    value = config.get(key)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    matches = [choice for choice in choices if choice == value and type(choice) is type(value)]
    if not matches:
        known = ", ".join(map(str, choices))
        raise ValueError(f"quantization_config: {key} is {shown(value)}, which is not supported, only {known}")
    return matches[0]


def read_names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the list of names under the first of `keys` that is present; empty if none is."""
    key = next((key for key in keys if config.get(key) is not None), None)
    value = [] if key is None else config[key]
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise ValueError(f"quantization_config: {key} is {shown(value)}, expected a list of names")
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise ValueError(f"quantization_config: {key} holds {shown(name)}, expected a name")
    return tuple(value)


def read_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; empty if it is missing or null."""
    value = config.get(key)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config: {key} is {shown(value)}, expected an object")
    return value


def refuse(config: Mapping[str, Any], key: str, way_out: str) -> None:
    """Raise ValueError if an unsupported option is set that would change the numbers."""
    if config.get(key):
        raise ValueError(f"quantization_config: {key} is {shown(config[key])}, which is not supported; {way_out}")

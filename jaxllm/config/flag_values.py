"""Read the values of flags from files in YAML, or in JSON, which is YAML too."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.utils.argparse_utils import Repeat


def read_yaml(name: str, flag: str) -> dict[Any, Any]:
    """Return the content of the file that a flag names. Raises VLLMValidationError unless it is a mapping, or empty."""
    try:
        content = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError, yaml.YAMLError) as error:
        raise VLLMValidationError(f"--{flag} {name}: {error}", parameter=flag, value=name) from error
    if content is not None and not isinstance(content, dict):
        raise VLLMValidationError(
            f"--{flag} {name}: must hold 'flag: value' lines, got {shown(content)}.", parameter=flag, value=name
        )
    return content or {}


def unknown_key(label: str, key: Any, value: Any, known: Iterable[str]) -> VLLMValidationError:
    """Return the error for a key that is no flag, with the nearest of the known ones."""
    near = difflib.get_close_matches(str(key), list(known), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return VLLMValidationError(f"{label}: no flag is called {key!r}.{hint}", parameter=str(key), value=value)


def keys_of(action: argparse.Action) -> list[str]:
    """Return the file's possible keys for a flag: its long names, without a switch's --no-name."""
    names = [flag.removeprefix("--") for flag in action.option_strings if flag.startswith("--")]
    if isinstance(action, argparse.BooleanOptionalAction):
        names = [name for name in names if not name.startswith("no-")]
    return names or [action.dest]


def convert(action: argparse.Action, value: Any, label: str) -> Any:
    """Convert a YAML value as if it were written on the command line."""
    if value is None:
        return None
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise VLLMValidationError(
                f"{label} must be true or false, got {shown(value)}.", parameter=label, value=value
            )
        return value
    if isinstance(action, Repeat) or action.nargs in ("+", "*"):
        items = value if isinstance(value, list) else [value]
        return [_convert_one(action, item, label) for item in items]
    return _convert_one(action, value, label)


def _convert_one(action: argparse.Action, value: Any, label: str) -> Any:
    if isinstance(value, bool) and action.const is not None:
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    read: Any = action.type or str
    try:
        return read(text)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise VLLMValidationError(f"{label}: {error}", parameter=action.dest, value=value) from error

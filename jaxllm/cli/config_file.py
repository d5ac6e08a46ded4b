"""Read flags from `--config FILE.yaml`: its keys are long flags without dashes. The command line takes precedence."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.utils.argparse_utils import Repeat


def apply_config_file(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """If `words` contain --config, make the values in its file the parser's defaults."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    try:
        name = finder.parse_known_args(list(words))[0].config
    except argparse.ArgumentError:
        return  # the real parser will report it
    if name is None:
        return
    actions = {key: action for action in parser._actions if action.dest != "help" for key in _keys(action)}
    for key, value in _read(name).items():
        action = actions.get(str(key).replace("_", "-"))
        if action is None or key == "config":
            near = difflib.get_close_matches(str(key), actions, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise VLLMValidationError(f"{name}: no flag is called {key!r}.{hint}", parameter=str(key), value=value)
        parser.set_defaults(**{action.dest: _convert(action, value, f"{name}: {key}")})


def _keys(action: argparse.Action) -> list[str]:
    """Return the file's possible keys for a flag: its long names, without a switch's --no-name."""
    names = [flag.removeprefix("--") for flag in action.option_strings if flag.startswith("--")]
    if isinstance(action, argparse.BooleanOptionalAction):
        names = [name for name in names if not name.startswith("no-")]
    return names or [action.dest]


def _read(name: str) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError, yaml.YAMLError) as error:
        raise VLLMValidationError(f"--config {name}: {error}", parameter="config", value=name) from error
    if content is not None and not isinstance(content, dict):
        raise VLLMValidationError(
            f"--config {name}: must hold 'flag: value' lines, got {shown(content)}.", parameter="config", value=name
        )
    return content or {}


def _convert(action: argparse.Action, value: Any, label: str) -> Any:
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

"""Parse command lines in vLLM's style: numbers such as 10.5k, --max_model_len, and --group-config.field VALUE."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NoReturn

_NUMBER = re.compile(r"(-?[0-9]+)(\.[0-9]+)?([kmgtKMGT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([^\s=]+)")


def human_readable_int(text: str) -> int:
    """Read "2048", "1k" (1000), "1K" (1024) or "25.6k" (25600); anything else raises ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        shown = text if len(text) < 40 else text[:40] + "..."
        raise ValueError(f"{shown!r} is not a number such as 4096, 4k (4000), 4K (4096) or 25.6k")
    digits, fraction, unit = match.groups()
    if fraction is None:
        return int(digits) * (1024 if unit.isupper() else 1000) ** _POWERS[unit.lower()]
    if not unit.islower():
        raise ValueError(f"{text.strip()!r} has a fraction: only k, m, g and t, which are decimal, go with one")
    return int(Decimal(digits + fraction) * 1000 ** _POWERS[unit])


class Repeat(argparse.Action):
    """Collect a repeated flag in a list, which replaces the flag's default (from a config file, say)."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 (argparse calls it so)
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Append the values of one occurrence of the flag."""
        before = getattr(namespace, self.dest)
        added = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, added if before is self.default else [*before, *added])


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that accepts underscores for dashes, and the fields of a JSON argument one by one.

    `--a-config.b.c 1 --a-config.d+ x,y` is `--a-config '{"b": {"c": 1}, "d": ["x", "y"]}'`.
    """

    command: argparse.ArgumentParser | None = None
    """The parser of the chosen subcommand: errors suggest its flags."""

    def error(self, message: str) -> NoReturn:
        """Exit with an error; for an unknown flag it suggests the most similar one."""
        if message.startswith("unrecognized arguments: "):
            known = [flag for flag in (self.command or self)._option_string_actions if flag.startswith("--")]
            for word in message.split()[2:]:
                flag = word.partition("=")[0].replace("_", "-")
                if flag.startswith("--") and (near := difflib.get_close_matches(flag, known, n=1)):
                    message += f"; did you mean {near[0]}?"
        super().error(message)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (one signature for its overloads)
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """Rewrite such flags into the ones that were added, then parse as argparse does."""
        return super().parse_known_args(self._rewrite(sys.argv[1:] if args is None else list(args)), namespace)

    def _rewrite(self, words: Sequence[str]) -> list[str]:
        end = words.index("--") if "--" in words else len(words)
        rest = iter(words[:end])
        plain: list[str] = []
        groups: dict[str, dict[str, Any]] = {}
        for word in rest:
            name, equals, value = word.partition("=")
            dotted = _DOTTED.fullmatch(name)
            flag = self._find(dotted[1] if dotted else name)
            if flag is None:
                plain.append(word)
            elif dotted is None:
                plain.append(flag + equals + value)
            else:
                if not equals:
                    value = next(rest, None)
                if value is None:
                    self.error(f"argument {name}: expected one argument")
                _put(groups.setdefault(flag, {}), dotted[2].split("."), value)
        for flag, fields in groups.items():
            if any(word.partition("=")[0] == flag for word in plain):
                self.error(f"argument {flag}: give it as JSON or field by field, not both")
            plain += [flag, json.dumps(fields)]
        return [*plain, *words[end:]]

    def _find(self, name: str) -> str | None:
        """Return the flag that `name` spells, with dashes or underscores; None if no such flag was added."""
        if not name.startswith("-"):
            return None
        spellings = (name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_"))
        return next((flag for flag in spellings if flag in self._option_string_actions), None)


def _put(fields: dict[str, Any], path: list[str], text: str) -> None:
    """Set the field at `path`. If the last name ends in +, append to a list."""
    for name in path[:-1]:
        inner = fields.get(name)
        fields[name] = fields = inner if isinstance(inner, dict) else {}
    name = path[-1]
    if name.endswith("+"):
        before = fields.get(name[:-1])
        fields[name[:-1]] = [*(before if isinstance(before, list) else []), *text.split(",")]
    else:
        fields[name] = _read(text)


def _read(text: str) -> Any:
    """Parse JSON or a number such as 80g; return other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return human_readable_int(text)
    except ValueError:
        return text

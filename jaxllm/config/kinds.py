"""The kinds of engine arguments: a kind checks a value, reads it from a command line, and describes valid values."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import check_bool, check_choice, check_float, check_int, check_kind, check_str, shown
from jaxllm.utils.argparse_utils import Repeat, human_readable_int

_MAX_TEXT = 65_536
MAX_NAMES = 64
_MAX_SIZES = 1024


class Kind(Protocol):
    """The kind of an argument, which defines its valid values."""

    def check(self, name: str, value: Any) -> Any:
        """Return the value in its final form, or raise VLLMValidationError naming the argument."""
        ...

    def flag(self) -> dict[str, Any] | None:
        """Return the keywords for argparse's add_argument, or None if a command line cannot set the argument."""
        ...


def _argparse_type(read: Any) -> Any:
    """Let argparse show the message of a ValueError instead of its own."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


@dataclasses.dataclass(frozen=True)
class Integer:
    """The value is an integer in [low, high], or with `sized` a string such as "4k"; `words` stand for integers."""

    low: int
    high: int
    optional: bool = False
    sized: bool = False
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if isinstance(value, str):
            try:
                value = self._read(value)
            except ValueError as error:
                raise VLLMValidationError(f"{name}: {error}.", parameter=name, value=value) from error
        return check_int(name, value, self.low, self.high)

    def _read(self, text: str) -> int:
        if text in self.words:
            return self.words[text]
        return human_readable_int(text) if self.sized else int(text)

    def flag(self) -> dict[str, Any]:
        return {"type": _argparse_type(self._read), "metavar": "SIZE" if self.sized else "N"}


@dataclasses.dataclass(frozen=True)
class Number:
    """The value is a finite number in [low, high], or in (low, high]; None too if `optional`."""

    low: float
    high: float
    above_low: bool = False
    optional: bool = False

    def check(self, name: str, value: Any) -> float | None:
        if value is None and self.optional:
            return None
        return check_float(name, value, self.low, self.high, above_low=self.above_low)

    def flag(self) -> dict[str, Any]:
        return {"type": float, "metavar": "X"}


@dataclasses.dataclass(frozen=True)
class Switch:
    """The value is True or False, on the command line --flag or --no-flag."""

    optional: bool = False

    def check(self, name: str, value: Any) -> bool | None:
        return None if value is None and self.optional else check_bool(name, value)

    def flag(self) -> dict[str, Any]:
        return {"action": argparse.BooleanOptionalAction}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The value is one of a few choices: all integers, or all strings or None."""

    values: tuple[Any, ...]

    def check(self, name: str, value: Any) -> Any:
        return check_choice(name, value, self.values)

    def flag(self) -> dict[str, Any]:
        shown_values = ",".join(str(value) for value in self.values if value is not None)
        is_number = all(isinstance(value, int) for value in self.values)
        return {"metavar": "{" + shown_values + "}", "type": int if is_number else None}


@dataclasses.dataclass(frozen=True)
class Text:
    """The value is a string."""

    optional: bool = True
    may_be_empty: bool = False

    def check(self, name: str, value: Any) -> str | None:
        if (value is None and self.optional) or (value == "" and self.may_be_empty):
            return value
        return check_str(name, value, _MAX_TEXT)

    def flag(self) -> dict[str, Any]:
        return {"metavar": "TEXT"}


@dataclasses.dataclass(frozen=True)
class Token:
    """The value is a secret string, True for the stored one, False for none, None for the stored one, if any."""

    def check(self, name: str, value: Any) -> str | bool | None:
        return value if value is None or isinstance(value, bool) else check_str(name, value, _MAX_TEXT)

    def flag(self) -> dict[str, Any]:
        return {"nargs": "?", "const": True, "metavar": "TOKEN"}


@dataclasses.dataclass(frozen=True)
class Json:
    """The value is a dict of JSON values, or its JSON text."""

    def check(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, str):
            try:
                return self._read(value)
            except (ValueError, RecursionError) as error:
                raise VLLMValidationError(f"{name} is not JSON: {error}.", parameter=name, value=value) from error
        check_kind(name, value, dict)
        for key in value or ():
            if not isinstance(key, str):
                message = f"{name} must have strings for keys, got {shown(key)} ({type(key).__name__})."
                raise VLLMValidationError(message, parameter=name, value=value)
        try:
            return json.loads(json.dumps(value or {}))
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{name} must hold only what JSON can hold: {error}."
            raise VLLMValidationError(message, parameter=name, value=value) from error

    def flag(self) -> dict[str, Any]:
        return {"type": _argparse_type(self._read), "metavar": "JSON"}

    @staticmethod
    def _read(text: str) -> dict[str, Any]:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"{shown(text)} is not a JSON object")
        return value


@dataclasses.dataclass(frozen=True)
class Group[T]:
    """The value is a dataclass of settings, or a dict or JSON with some of them; None keeps all defaults."""

    made: type[T]

    def check(self, name: str, value: Any) -> T | None:
        if value is None or isinstance(value, self.made):
            return value
        if not isinstance(value, Mapping):
            message = f"{name} must be a dict or {self.made.__name__}, got {shown(value)} ({type(value).__name__})."
            raise VLLMValidationError(message, parameter=name, value=value)
        fields = dataclasses.fields(cast(Any, self.made))
        known = [field.name for field in fields]
        for key in value:
            if key not in known:
                taken = ", ".join(field.name for field in fields if "refused" not in field.metadata)
                message = f"{name} has no {shown(key)}; it takes {taken}."
                raise VLLMValidationError(message, parameter=name, value=key)
        return self.made(**value)

    def flag(self) -> dict[str, Any]:
        return Json().flag()


def _check_list(name: str, value: Any, most: int) -> Sequence[Any]:
    """Return `value` if it is a list of at most `most` items, or refuse it."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence) or len(value) > most:
        message = f"{name} must be a list of at most {most}, got {shown(value)} ({type(value).__name__})."
        raise VLLMValidationError(message, parameter=name, value=value)
    return value


@dataclasses.dataclass(frozen=True)
class Names:
    """The value is a list of objects, or of their names."""

    metavar: str
    single: bool = False
    """True if a single name needs no list, and the list only has names."""
    repeats: bool = False
    """True if the flag may be repeated, each time with more names."""

    def check(self, name: str, value: Any) -> list[Any] | None:
        if value is None:
            return None
        if self.single and isinstance(value, str):
            value = [value]
        names = _check_list(name, value, MAX_NAMES)
        return [check_str(name, each, _MAX_TEXT) if self.single or isinstance(each, str) else each for each in names]

    def flag(self) -> dict[str, Any]:
        return {"nargs": "+", "metavar": self.metavar} | ({"action": Repeat} if self.repeats else {})


@dataclasses.dataclass(frozen=True)
class JsonNames:
    """The value is a list of strings; on a command line JSON, or one string."""

    def check(self, name: str, value: Any) -> list[str]:
        return [check_str(name, each, _MAX_TEXT) for each in _check_list(name, value, MAX_NAMES)]

    def flag(self) -> dict[str, Any]:
        return {"type": self._read, "metavar": "JSON"}

    @staticmethod
    def _read(text: str) -> Any:
        value = _guess(text)
        return [value] if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The value is a list of integers in [low, high]; an empty one counts as None."""

    high: int
    low: int = 1

    def check(self, name: str, value: Any) -> list[int] | None:
        if value is None:
            return None
        sizes = enumerate(_check_list(name, value, _MAX_SIZES))
        return [check_int(f"{name}[{i}]", size, self.low, self.high, parameter=name) for i, size in sizes] or None

    def flag(self) -> dict[str, Any]:
        return {"type": int, "nargs": "+", "metavar": "N"}


@dataclasses.dataclass(frozen=True)
class Dtype:
    """The value is a dtype by name, or anything that numpy accepts as one."""

    names: tuple[str, ...] = ("auto", "half", "float16", "bfloat16", "float", "float32")

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            import numpy as np

            with contextlib.suppress(TypeError, ValueError):  # refused just below, by name
                value = np.dtype(value).name
        return check_choice(name, value, self.names)

    def flag(self) -> dict[str, Any]:
        return {"metavar": "{" + ",".join(self.names) + "}"}


@dataclasses.dataclass(frozen=True)
class ClassName:
    """The value is a class, or its name, "module.Class" or "module:Class"."""

    def check(self, name: str, value: Any) -> type | str | None:
        if value is None or isinstance(value, type):
            return value
        module, _, attribute = check_str(name, value, _MAX_TEXT).replace(":", ".").rpartition(".")
        if not module or not attribute:
            raise VLLMValidationError(
                f"{name} must be a class or its dotted name 'module.Class', got {shown(value)}.",
                parameter=name,
                value=value,
            )
        return value

    def flag(self) -> dict[str, Any]:
        return {"metavar": "MODULE.CLASS"}


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """The value is a jax.sharding.Mesh; a command line cannot set it."""

    def check(self, name: str, value: Any) -> Any:
        if value is not None:
            from jax.sharding import Mesh

            check_kind(name, value, Mesh)
        return value

    def flag(self) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """The value is the default of vLLM's argument (`only`), or one that means the same (`also`)."""

    only: Any
    reason: str
    also: tuple[Any, ...] = ()

    def check(self, name: str, value: Any) -> Any:
        if any(type(value) is type(each) and value == each for each in (self.only, *self.also)):
            return value
        raise VLLMValidationError(
            f"{name}={shown(value)} is not supported: {self.reason}. Leave {name} at {self.only!r}.",
            parameter=name,
            value=value,
        )

    def flag(self) -> dict[str, Any]:
        taken = (self.only, *self.also)
        if any(isinstance(value, bool) for value in taken):
            return {"action": argparse.BooleanOptionalAction}
        return {"type": _guess, "nargs": "+" if any(isinstance(value, list) for value in taken) else None}


def _guess(text: str) -> Any:
    """Read an unsupported argument's value, for the message that refuses it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def argument[T](default: T, kind: Kind, group: str, help_text: str, *aliases: str) -> T:
    """Declare a dataclass field that is an engine argument, with the type of its default."""
    metadata = {"kind": kind, "group": group, "help": help_text, "aliases": aliases}
    if isinstance(default, (dict, list)):
        return cast(T, dataclasses.field(default_factory=type(default), metadata=metadata))
    return cast(
        T, dataclasses.field(default=default, metadata=metadata, repr=not isinstance(kind, Token | Unsupported))
    )


def required(kind: Kind, group: str, help_text: str) -> Any:
    """Declare a dataclass field that is an engine argument without a default."""
    return dataclasses.field(metadata={"kind": kind, "group": group, "help": help_text, "aliases": ()})


def unsupported(default: Any, reason: str, *, also: tuple[Any, ...] = (), aliases: tuple[str, ...] = ()) -> Any:
    """Declare an argument of vLLM that is refused by name, with the reason, unless it has its default."""
    return argument(default, Unsupported(default, reason, also), "", argparse.SUPPRESS, *aliases)


def check_fields(args: Any) -> None:
    """Check every argument of the dataclass instance and store its final form."""
    for field in dataclasses.fields(args):
        setattr(args, field.name, field.metadata["kind"].check(field.name, getattr(args, field.name)))


def add_flags(parser: argparse.ArgumentParser, fields: tuple[dataclasses.Field[Any], ...]) -> None:
    """Add one flag per field, grouped as in vLLM's help; flags of unsupported arguments are hidden."""
    groups: dict[str, Any] = {"": parser}
    for field in fields:
        keywords, title = field.metadata["kind"].flag(), field.metadata["group"]
        if keywords is None:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        words = {key: value for key, value in keywords.items() if value is not None}
        flags = ["--" + field.name.replace("_", "-"), *field.metadata["aliases"]]
        help_text = field.metadata["help"]
        if help_text is not argparse.SUPPRESS:
            help_text = help_text.replace("%", "%%")
        groups[title].add_argument(*flags, dest=field.name, default=default, help=help_text, **words)

"""Read calls written as JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from jaxllm.parsers.incoming import Incoming, Reading
from jaxllm.parsers.json_text import is_sendable, read_object
from jaxllm.parsers.tool_parser import Attempt, ToolParser

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type", "tool_call_id")
"""Keys that may come before a call's name and are ignored."""


class JsonCall:
    """Reads one call from an object and shows it through a parser, its arguments as they come."""

    def __init__(
        self,
        parser: ToolParser,
        *,
        takes: Callable[[str], bool] = bool,
        default: str | None = None,
        name_key: str = "name",
    ) -> None:
        """Read a call for `parser`, to a function with a name, at `name_key`, that `takes` accepts.

        With an empty `name_key` the first key is the name, and its value the arguments. An object without arguments is
        not a call, unless it has nothing else and there are `default` arguments.
        """
        self._parser, self._takes, self._default, self._name_key = parser, takes, default, name_key
        self._incoming: Incoming = parser.incoming
        self.has_begun = False
        """Whether the call has been shown."""
        self.has_arguments = False
        """Whether its arguments were read completely."""
        self._name: str | None = None
        self._early: str | None = None
        """The arguments, if they came before the name."""
        self._has_others = False
        """Whether there is an unknown member."""

    def read(self) -> Reading[bool]:
        """Read the object; False if it is not a call, or is malformed later."""
        incoming = self._incoming
        if not (yield from incoming.take("{")):
            return False
        yield from incoming.skip_space()
        if (yield from incoming.take("}")):
            return False
        while True:
            start = incoming.trial()
            is_member = yield from self._member()
            text = incoming.settle(start)
            if not is_member:
                if self.has_begun and self.has_arguments and self._parser.keeps_parts:
                    self._parser.show_text(text)
                return False
            yield from incoming.skip_space()
            if (yield from incoming.take("}")):
                if self._name is not None and not self.has_arguments and not self._has_others and self._default:
                    self.has_arguments = True
                    self._show(self._default)
                return self.has_begun
            if not (yield from incoming.take(",")):
                return False

    def _member(self) -> Reading[bool]:
        """Read a key and its value."""
        incoming = self._incoming
        yield from incoming.skip_space()
        key = yield from self._string()
        yield from incoming.skip_space()
        if key is None or not (yield from incoming.take(":")):
            return False
        yield from incoming.skip_space()
        if not self._name_key and self._name is None:
            self._name = key
            return self._takes(key) and (yield from self._arguments())
        if key == self._name_key and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self.has_arguments:
            return (yield from self._arguments())
        return (yield from self._other(key))

    def _read_name(self) -> Reading[bool]:
        name = yield from self._string()
        if name is None or not self._takes(name):
            return False
        self._name = name
        if self._early is not None:
            self._show(self._early)
        return True

    def _arguments(self) -> Reading[bool]:
        """Read the arguments: an object, null for none, a string that holds an object's text, or any other value."""
        incoming, pieces = self._incoming, list[str]()
        is_nested = (yield from incoming.next_is("{")) or (yield from incoming.next_is("["))
        show = self._show if is_nested and self._name is not None else pieces.append
        if not (yield from incoming.json_value(show)):
            return False
        self.has_arguments = True
        if pieces:
            arguments = _arguments_of("".join(pieces))
            if self._name is None:
                self._early = arguments
            else:
                self._show(arguments)
        return True

    def _other(self, key: str) -> Reading[bool]:
        """Read the value of an unknown member. Before a name, most keys mean that the object is not a call."""
        if key not in _OTHERS:
            if self._name is None:
                return False
            self._has_others = True
        return (yield from self._incoming.json_value(_drop))

    def _show(self, arguments: str) -> None:
        """Show more of the arguments; the call begins with the first of them."""
        if not self.has_begun:
            assert self._name is not None
            self.has_begun = True
            self._parser.start_call(self._name)
        self._parser.show_arguments(arguments)

    def _string(self) -> Reading[str | None]:
        """Read a string; None if there is none."""
        pieces = list[str]()
        if not (yield from self._incoming.json_string(pieces.append)):
            return None
        text = json.loads("".join(pieces))
        return text if is_sendable(text) else None


def _arguments_of(value: str) -> str:
    """Return the arguments in a JSON value."""
    if value == "null":
        return "{}"
    text = json.loads(value) if value.startswith('"') else ""
    return value if read_object(text) is None or not is_sendable(text) else text


def _drop(text: str) -> None:
    """Show nothing."""
    del text


def read_call(
    parser: ToolParser,
    attempt: Attempt,
    *,
    takes: Callable[[str], bool] = bool,
    default: str | None = None,
    name_key: str = "name",
    ends: Sequence[str],
) -> Reading[bool]:
    """Read the next call after white space, conclude the attempt, and return whether a call was shown.

    Malformed arguments of a shown call extend up to one of `ends`.
    """
    call = JsonCall(parser, takes=takes, default=default, name_key=name_key)
    yield from parser.incoming.skip_space()
    is_whole = yield from call.read()
    if call.has_begun and not call.has_arguments and parser.keeps_parts:
        yield from parser.malformed_arguments(ends, "}")
    return parser.conclude(attempt, is_call=is_whole)


def read_calls(
    parser: ToolParser,
    attempt: Attempt,
    *,
    default: str | None = None,
    name_key: str = "name",
    ends: Sequence[str],
) -> Reading[bool]:
    """Read the calls of a list after its opening bracket, up to the closing one; return whether it begins with a call.

    The other parameters are those of `read_call`.
    """
    is_call = False
    while (yield from read_call(parser, attempt, default=default, name_key=name_key, ends=ends)):
        is_call, attempt = True, parser.attempt()
        if not (yield from parser.incoming.take_spaced(",")):
            parser.give_up(attempt)
            yield from parser.incoming.take_spaced("]")
            break
    return is_call

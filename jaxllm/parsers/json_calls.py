"""Calls that are written as JSON objects of a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable

from jaxllm.parsers.incoming import Incoming, Reading
from jaxllm.parsers.json_text import as_json, is_sendable
from jaxllm.parsers.tool_parser import ToolParser

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")
"""What a call may say besides, which has no meaning."""


class JsonCall:
    """This reads one call that is an object, and shows it through a parser: its arguments as they come."""

    def __init__(self, parser: ToolParser, *, takes: Callable[[str], bool] = bool) -> None:
        """Read a call for `parser`, of a function whose name `takes` takes."""
        self._parser, self._takes = parser, takes
        self._incoming: Incoming = parser.incoming
        self.has_begun = False
        """Whether the call has been shown: what follows cannot be text any more, unless it is malformed."""
        self._early: str | None = None
        """The arguments, if they came before the name."""
        self._has_arguments = False

    def read(self) -> Reading[bool]:
        """Read the object; False where it is no call, or ends being one."""
        incoming = self._incoming
        if not (yield from incoming.take("{")):
            return False
        yield from incoming.skip_space()
        if (yield from incoming.take("}")):
            return False
        while True:
            start, had_arguments = incoming.trial(), self._has_arguments
            is_member = yield from self._member()
            text = incoming.settle(start)
            if not is_member:
                if self.has_begun and self._has_arguments == had_arguments:
                    self._parser.show_text(text)
                return False
            yield from incoming.skip_space()
            if (yield from incoming.take("}")):
                break
            if not (yield from incoming.take(",")):
                return False
        if self.has_begun and not self._has_arguments:
            self._parser.show_arguments("{}")
        return self.has_begun

    def _member(self) -> Reading[bool]:
        """Read a key and its value."""
        incoming = self._incoming
        yield from incoming.skip_space()
        key = yield from self._string()
        yield from incoming.skip_space()
        if key is None or not (yield from incoming.take(":")):
            return False
        yield from incoming.skip_space()
        if key == "name" and not self.has_begun:
            return (yield from self._name())
        if key in _ARGUMENTS and not self._has_arguments:
            return (yield from self._arguments())
        return key in _OTHERS and (yield from incoming.json_value(_drop))

    def _name(self) -> Reading[bool]:
        name = yield from self._string()
        if name is None or not self._takes(name):
            return False
        self.has_begun = True
        self._parser.start_call(name)
        if self._early is not None:
            self._parser.show_arguments(self._early)
        return True

    def _arguments(self) -> Reading[bool]:
        """Read the arguments: an object, null for none, or a string that holds their text, else what it says."""
        incoming, pieces = self._incoming, list[str]()
        show = self._parser.show_arguments if self.has_begun else pieces.append
        if (yield from incoming.next_is("{")):
            self._has_arguments = True
            if not (yield from incoming.json_value(show)):
                return False
        elif (yield from incoming.next_is('"')):
            text = yield from self._string()
            if text is None:
                return False
            show(text if _is_object(text) else as_json(text))
        elif (yield from incoming.take("null")):
            show("{}")
        else:
            return False
        self._has_arguments = True
        if not self.has_begun:
            self._early = "".join(pieces)
        return True

    def _string(self) -> Reading[str | None]:
        """Read a string, None if there is none."""
        pieces = list[str]()
        if not (yield from self._incoming.json_string(pieces.append)):
            return None
        text = json.loads("".join(pieces))
        return text if is_sendable(text) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _drop(text: str) -> None:
    """Show nothing."""
    del text


def read_call(parser: ToolParser, *, after: str = "", takes: Callable[[str], bool] = bool) -> Reading[bool]:
    """Read a call that comes next, white space aside, and say whether it is one to its end.

    What is none is text once it is read, with the mark `after` which it came.
    """
    call = JsonCall(parser, takes=takes)
    start = parser.incoming.trial()
    yield from parser.incoming.skip_space()
    is_whole = yield from call.read()
    text = parser.incoming.settle(start)
    if not call.has_begun:
        parser.show_text(after + text)
    return is_whole

"""Read calls with a name before their arguments, each between marks."""

from __future__ import annotations

import abc
import re
from typing import ClassVar, NamedTuple

from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tool_parser import Attempt, ToolParser

NAME = re.compile(r"[^<>\s{}`\"]+")
MAX_NAME = 256


class Head(NamedTuple):
    """What a call says before its arguments."""

    name: str
    call_id: str | None = None
    tail: str = ""
    """The text between the arguments and the end of the call, which models may omit."""


class NamedCallsParser(ToolParser):
    """Reads calls from `call` to `call_end`, optionally several between `start` and `end`."""

    start: ClassVar[str] = ""
    end: ClassVar[str] = ""
    call: ClassVar[str]
    call_end: ClassVar[str]
    quote: ClassVar[str] = '"'
    """The mark around strings in the arguments, as in `Incoming.json_value`."""

    @abc.abstractmethod
    def head(self) -> Reading[Head | None]:
        """Read a call up to its arguments; None if it is not a call."""

    def read(self) -> Reading[None]:
        """Read text and calls in turns."""
        incoming = self.incoming
        openers = (self.start, self.call) if self.start else (self.call,)
        while mark := (yield from incoming.until(openers, self.show_text)):
            attempt = self.attempt(mark)
            if mark == self.start and not (yield from incoming.take_spaced(self.call)):
                self.conclude(attempt, is_call=False)
                continue
            is_whole = yield from self._call(attempt)
            while is_whole and not (self.end and (yield from incoming.take_spaced(self.end))):
                attempt = self.attempt()
                if not (yield from incoming.take_spaced(self.call)):
                    self.give_up(attempt)
                    break
                is_whole = yield from self._call(attempt)

    def _call(self, attempt: Attempt) -> Reading[bool]:
        """Read a call and conclude the attempt; return whether it is well formed."""
        incoming = self.incoming
        head, is_whole = (yield from self.head()), False
        if head is not None and head.name and (yield from incoming.next_is("{")):
            self.start_call(head.name, head.call_id)
            is_whole = (yield from incoming.json_value(self.show_arguments, self.quote)) or (
                yield from self.malformed_arguments((self.call_end,), head.tail)
            )
            if head.tail:
                yield from incoming.take_spaced(head.tail)
        self.conclude(attempt, is_call=is_whole)
        return is_whole and (yield from incoming.take_spaced(self.call_end))

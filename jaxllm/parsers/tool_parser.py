"""The base class of tool parsers, which read calls and define their grammar."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Incoming, Reading
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text, new_call_id


class Attempt(NamedTuple):
    """The state at the beginning of an attempt to read a call."""

    start: int
    num_calls: int
    space: list[str] | None


class ToolParser(abc.ABC):
    """Parses one answer into text and calls, as a `pieces.StreamParser`.

    A call begins once its name and first argument are certain, and its arguments follow as they come. Text that is not
    a call remains text. A call that turns out to be malformed keeps the arguments that the model wrote, unless the
    parser `holds_calls`. So only the marks of well-formed calls are dropped, arguments are never invented, and nothing
    raises.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    """The marks of calls. The first one begins calls and ends unclosed reasoning.

    Marks that are special tokens must be kept in the text.
    """
    drops_text_after_calls: ClassVar[bool] = False
    """Whether text after a held call is dropped, as in vLLM for some models."""
    holds_calls: bool = False
    """Whether a call is shown only once it is whole, as without streaming. A malformed call is then text."""

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        """Read calls of these tools, and of others unless a call is only recognized by its name."""
        self.tools = {tool.name: tool for tool in tools}
        self.incoming = Incoming()
        self.is_cut = False
        """Whether the ended output was cut by its token limit."""
        self._pieces: list[Piece] = []
        self._num_certain: int | None = None
        """The number of pieces before a call that is held."""
        self._num_calls = 0
        self._space: list[str] | None = []
        """White space at the beginning or after a call, shown if text follows; None within text."""
        self._reading = self._read_all()

    @abc.abstractmethod
    def read(self) -> Reading[None]:
        """Read `incoming`, and show pieces as they become certain. Text left unread at the end is text."""

    @classmethod
    @abc.abstractmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return a format of structural tags (`constraints/structural_tag.py`) that outputs with calls match.

        Each call is to one of the tools, with arguments that match its schema. With `at_least_one` there are only
        calls, else text may come before or instead of them. Unless `parallel` there is at most one call. This parser
        reads all matching outputs without loss, except strings between tags that contain these tags.
        """

    @classmethod
    def with_suffix(cls, suffix: str) -> type[ToolParser]:
        """Return the class for a checkpoint with this suffix in its marks (`mark_suffix`); most models have none."""
        del suffix
        return cls

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""
        self.incoming.add(text)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the remaining pieces once the output has ended. A partial call counts if it `is_cut` by its limit."""
        self.incoming.is_ended, self.is_cut = True, is_cut
        return self._advance()

    def show_text(self, text: str) -> None:
        """Show text of the answer."""
        if not (self.holds_calls and self.drops_text_after_calls and self._num_calls):
            self._show_text(text)

    def _show_text(self, text: str) -> None:
        if self._space is not None:
            if not text or text.isspace():
                self._space.append(text)
                return
            text, self._space = "".join(self._space) + text, None
        self._pieces.append(Text(text))

    def show_reasoning(self, text: str) -> None:
        """Show reasoning."""
        self._pieces.append(Reasoning(text))

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call, with a new id unless the model wrote one."""
        self._pieces.append(CallStart(self._num_calls, name, call_id or new_call_id()))
        self._num_calls += 1
        self._space = []

    def show_arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._pieces.append(CallArguments(self._num_calls - 1, text))

    @property
    def keeps_parts(self) -> bool:
        """Return whether a call that has begun stays a call, though it is malformed later."""
        return not self.holds_calls or self.is_cut

    def attempt(self, mark: str = "") -> Attempt:
        """Begin an attempt to read a call, after its `mark` was read; `conclude` or `give_up` ends it."""
        if self.holds_calls:
            self._num_certain = len(self._pieces)
        return Attempt(self.incoming.trial() - len(mark), self._num_calls, self._space)

    def conclude(self, attempt: Attempt, *, is_call: bool) -> bool:
        """End an attempt, and return whether a call was shown; otherwise its text and mark become text.

        A call that is malformed later stays a call if the parser `keeps_parts`.
        """
        text = self.incoming.settle(attempt.start)
        if is_call or (self._num_calls > attempt.num_calls and self.keeps_parts):
            self._num_certain = None
            return True
        self._forget(attempt)
        self._show_text(text)
        return False

    def give_up(self, attempt: Attempt) -> None:
        """End an attempt that showed no call, and unread its text and mark."""
        self._forget(attempt)
        self.incoming.rewind(attempt.start)

    def _forget(self, attempt: Attempt) -> None:
        """Drop the pieces of a call that is held."""
        if self._num_certain is not None:
            del self._pieces[self._num_certain :]
            self._num_certain = None
        self._num_calls, self._space = attempt.num_calls, attempt.space

    def malformed_arguments(self, ends: Sequence[str], tail: str = "") -> Reading[bool]:
        """Add malformed arguments up to one of `ends`, and return whether there is one.

        They exclude white space and the `tail` before the end, and a partial end at the end of the output.
        """
        kept = list[str]()

        def show(text: str) -> None:
            certain = text.rstrip(" \t\r\n" + tail)
            if certain:
                self.show_arguments("".join(kept) + certain)
                kept.clear()
            kept.append(text[len(certain) :])

        end = yield from self.incoming.until(tuple(ends), show, leaves_part=True)
        rest, part = "".join(kept), self.incoming.rest() if end is None else ""
        self.show_arguments(rest if end is None and not part else rest.rstrip().removesuffix(tail).rstrip())
        self.incoming.unread(end or "")
        return end is not None

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        end = len(self._pieces)
        if self._num_certain is not None:
            end, self._num_certain = self._num_certain, 0
        pieces = self._pieces[:end]
        del self._pieces[:end]  # copying the held text for each piece would take quadratic time
        return pieces

    def _read_all(self) -> Reading[None]:
        yield from self.read()
        while (yield from self.incoming.has(1)):
            self.show_text(self.incoming.rest())
        if self._space and not self._num_calls:
            self._pieces.append(Text("".join(self._space)))

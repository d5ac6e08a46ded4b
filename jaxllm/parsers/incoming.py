"""Read the text of an output as it comes, by generators that yield when they need more text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence, Set
from typing import NamedTuple

from jaxllm.parsers.json_text import as_json

type Reading[T] = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns its result."""

_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
"""Characters of a JSON string that stand for themselves."""
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NEVER = r"(?!)"
"""A pattern that nothing matches."""
_SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]+")
_KEY_CHARACTERS = re.compile(r"[^\s:,<>{}\[\]\"]+")
_MAX_SCALAR = 400
_MAX_DEPTH = 100
_KEPT = 4096
"""Read text is dropped once it reaches this many characters."""


class _Marks(NamedTuple):
    """Marks to search for, compiled once: there may be one for each of a thousand tools."""

    pattern: re.Pattern[str]
    beginnings: Set[str]
    longest: int
    """The length of the longest proper prefix of a mark."""


class Incoming:
    """The text received so far, and the position read up to. Results do not depend on how the text was split."""

    def __init__(self) -> None:
        self.is_ended = False
        self._text, self._place = "", 0
        self._dropped = 0
        """The number of characters dropped from the beginning."""
        self._num_trials = 0
        self._compiled: dict[tuple[str, ...], _Marks] = {}

    def add(self, text: str) -> None:
        """Append text."""
        if self._place > _KEPT and self._num_trials == 0:
            self._text, self._dropped, self._place = self._text[self._place :], self._dropped + self._place, 0
        # A string with one reference grows in place; otherwise a long call would be copied for each piece.
        grown, self._text = self._text, ""
        grown += text
        self._text = grown

    def trial(self) -> int:
        """Begin a trial, which may have to be undone; `settle` ends it."""
        self._num_trials += 1
        return self._place + self._dropped

    def settle(self, start: int) -> str:
        """End a trial and return its text."""
        self._num_trials -= 1
        return self._text[start - self._dropped : self._place]

    def rewind(self, start: int) -> None:
        """End a trial and unread its text."""
        self._num_trials -= 1
        self._place = start - self._dropped

    def unread(self, mark: str) -> None:
        """Unread the last mark."""
        self._place -= len(mark)

    def rest(self) -> str:
        """Read and return all text received."""
        text, self._place = self._text[self._place :], len(self._text)
        return text

    def has(self, count: int) -> Reading[bool]:
        """Wait for this many characters; False if the text ends before."""
        while len(self._text) - self._place < count and not self.is_ended:
            yield
        return len(self._text) - self._place >= count

    def next_is(self, mark: str) -> Reading[bool]:
        """Return whether the mark is next."""
        while True:
            here = self._text[self._place : self._place + len(mark)]
            if len(here) == len(mark) or self.is_ended or not mark.startswith(here):
                return here == mark
            yield

    def take(self, mark: str) -> Reading[bool]:
        """Read a mark if it is next, and return whether it was."""
        if (yield from self.next_is(mark)):
            self._place += len(mark)
            return True
        return False

    def take_any(self, marks: Sequence[str]) -> Reading[str | None]:
        """Read and return the first of the marks that is next, or None."""
        for mark in marks:
            if (yield from self.take(mark)):
                return mark
        return None

    def take_any_spaced(self, marks: Sequence[str]) -> Reading[str | None]:
        """Read white space and the first of the marks that is next, and return it; else read nothing."""
        for mark in marks:
            if (yield from self.take_spaced(mark)):
                return mark
        return None

    def take_spaced(self, mark: str) -> Reading[bool]:
        """Read white space and a mark if they are next, else nothing; return whether they were."""
        start = self.trial()
        yield from self.skip_space()
        is_there = yield from self.take(mark)
        if is_there:
            self.settle(start)
        else:
            self.rewind(start)
        return is_there

    def skip_space(self) -> Reading[str]:
        """Read white space and return it."""
        text = ""
        while (yield from self.has(1)):
            end = self._place
            while end < len(self._text) and self._text[end] in _SPACE:
                end += 1
            text += self._text[self._place : end]
            self._place = end
            if end < len(self._text):
                break
        return text

    def take_while(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Read and return at most `most` characters that match the pattern, which is a repeated character class."""
        text = ""
        while len(text) < most and (yield from self.has(1)):
            part = self._matched(pattern, self._place + most - len(text))
            if not part:
                break
            text += part
        return text

    def _matched(self, pattern: re.Pattern[str], end: int) -> str:
        """Read and return a pattern's match up to a position. The match object, which holds the text, is not kept."""
        match = pattern.match(self._text, self._place, end)
        if match is None:
            return ""
        self._place = match.end()
        return match[0]

    def until(
        self, marks: tuple[str, ...], show: Callable[[str], None], *, leaves_part: bool = False
    ) -> Reading[str | None]:
        """Read up to and including the first of the marks; None if the text ends before. `show` gets the text before
        it, piece by piece. A partial mark at the end of the text is shown, or left unread with `leaves_part`.
        """
        if marks not in self._compiled:
            self._compiled[marks] = _compiled(marks)
        pattern, beginnings, longest = self._compiled[marks]
        while True:
            match = pattern.search(self._text, self._place)
            # A shorter mark may begin a longer one that is still incomplete.
            if match and not self.is_ended and self._may_grow(match, beginnings, longest):
                match, end = None, match.start()
            else:
                end = match.start() if match else len(self._text)
                if match is None and (leaves_part or not self.is_ended):
                    lengths = range(min(longest, end - self._place), 0, -1)
                    end -= next((length for length in lengths if self._text[end - length :] in beginnings), 0)
            if end > self._place:
                show(self._text[self._place : end])
            self._place = match.end() if match else end
            if match:
                return match[0]
            if self.is_ended:
                return None
            yield

    def _may_grow(self, match: re.Match[str], beginnings: Set[str], longest: int) -> bool:
        """Return whether all text from the match on may be the beginning of a longer mark."""
        return len(self._text) - match.start() <= longest and self._text[match.start() :] in beginnings

    def json_value(self, show: Callable[[str], None], quote: str = '"') -> Reading[bool]:
        """Read a JSON value; `show` gets its text piece by piece, with control characters in strings escaped.

        With another `quote`, strings between two of it are verbatim, keys are bare, and the last member may have a
        comma; `show` gets JSON all the same. False if the text is not JSON; what was shown is then a valid beginning.
        """
        closers: list[str] = []
        while True:
            show((yield from self.skip_space())) if closers else (yield from self.skip_space())
            if not (yield from self.has(1)):
                return False
            first = self._text[self._place]
            if first in "{[":
                if len(closers) == _MAX_DEPTH:
                    return False
                self._place += 1
                show(first)
                closers.append("}" if first == "{" else "]")
                show((yield from self.skip_space()))
                if not (yield from self.take(closers[-1])):
                    if first == "{" and not (yield from self._key(show, quote)):
                        return False
                    continue
                show(closers.pop())
            elif first == '"':
                if not (yield from self.json_string(show)):
                    return False
            elif quote != '"' and (yield from self._take_whole(quote)):
                if not (yield from self._verbatim_string(show, quote)):
                    return False
            elif not (yield from self._scalar(show)):
                return False
            if not (yield from self._after_value(closers, show, quote)):
                return False
            if not closers:
                return True

    def _after_value(self, closers: list[str], show: Callable[[str], None], quote: str) -> Reading[bool]:
        """Read closing brackets after a value, up to a comma and the next key if there is one."""
        while closers:
            show((yield from self.skip_space()))
            if (yield from self.take(",")):
                if quote == '"' or not (yield from self._is_spaced(closers[-1])):
                    show(",")
                    return True if closers[-1] == "]" else (yield from self._key(show, quote))
                show((yield from self.skip_space()))
            if not (yield from self.take(closers[-1])):
                return False
            show(closers.pop())
        return True

    def _is_spaced(self, mark: str) -> Reading[bool]:
        """Return whether white space and the mark are next."""
        start = self.trial()
        is_there = yield from self.take_spaced(mark)
        self.rewind(start)
        return is_there

    def _key(self, show: Callable[[str], None], quote: str) -> Reading[bool]:
        show((yield from self.skip_space()))
        if quote != '"' and not (yield from self.next_is('"')):
            if not (yield from self._bare_key(show, quote)):
                return False
        elif not (yield from self.json_string(show)):
            return False
        show((yield from self.skip_space()))
        if not (yield from self.take(":")):
            return False
        show(":")
        return True

    def json_string(self, show: Callable[[str], None]) -> Reading[bool]:
        """Read a JSON string, as `json_value` does."""
        if not (yield from self.take('"')):
            return False
        show('"')
        while (yield from self.has(1)):
            plain = self._matched(_PLAIN, len(self._text))
            if plain:
                show(plain)
                continue
            character = self._text[self._place]
            if character == '"':
                self._place += 1
                show('"')
                return True
            length = 1
            if character == "\\":
                if not (yield from self.has(2)):
                    return False
                length = 6 if self._text[self._place + 1] == "u" else 2
                if not (yield from self.has(length)) or not _is_escape(self._text[self._place : self._place + length]):
                    return False
            shown = self._text[self._place : self._place + length]
            self._place += length
            show(shown if length > 1 else json.dumps(shown)[1:-1])
        return False

    def _bare_key(self, show: Callable[[str], None], quote: str) -> Reading[bool]:
        """Read a key without quotes or between two of `quote`, and show it as a JSON string."""
        if (yield from self._take_whole(quote)):
            return (yield from self._verbatim_string(show, quote))
        start = self.trial()
        key = yield from self.take_while(_KEY_CHARACTERS, _MAX_SCALAR)
        is_key = key != "" and (yield from self._is_spaced(":"))
        is_cut = key != "" and not (yield from self.has(1))
        if not is_key and not is_cut:
            self.rewind(start)
            return False
        self.settle(start)
        show(as_json(key)[: None if is_key else -1])
        return is_key

    def _take_whole(self, mark: str) -> Reading[bool]:
        """Read a mark if it is next, and return whether it was; a part of it at the end of the text is read too."""
        is_there = yield from self.take(mark)
        if not is_there and not (yield from self.has(len(mark))) and mark.startswith(self._text[self._place :]):
            self.rest()
        return is_there

    def _verbatim_string(self, show: Callable[[str], None], quote: str) -> Reading[bool]:
        """Read text up to `quote`, and show it as a JSON string, without a part of `quote` at the end of the text."""
        show('"')
        if (yield from self.until((quote,), lambda text: show(as_json(text)[1:-1]), leaves_part=True)) is None:
            self.rest()
            return False
        show('"')
        return True

    def _scalar(self, show: Callable[[str], None]) -> Reading[bool]:
        """Read a number or a word, shown as a whole."""
        start = self.trial()
        scalar = yield from self.take_while(_SCALAR_CHARACTERS, _MAX_SCALAR)
        self.settle(start)
        if _SCALAR.fullmatch(scalar):
            show(scalar)
            return True
        self._place -= len(scalar)
        return False


def _compiled(marks: Sequence[str]) -> _Marks:
    pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or _NEVER)
    beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
    return _Marks(pattern, beginnings, max(map(len, beginnings), default=0))


def _is_escape(text: str) -> bool:
    return text[1] in '"\\/bfnrt' if len(text) == 2 else all(each in "0123456789abcdefABCDEF" for each in text[2:])

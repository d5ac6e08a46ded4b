"""gpt-oss' harmony format: an output is messages in channels, some of them addressed to functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tool_parser import ToolParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BETWEEN = (START, CHANNEL, *_ENDS)
_TO = " to="
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_PREFIX = "functions."
_NO_FUNCTIONS = {"assistant", "python", "browser", "container"}
"""Recipients, or the part before a dot, that are not functions of the request."""
_HEAD = re.compile(r"[^<{}\"]+")
_MAX_HEAD = 1000


class OpenAIParser(ToolParser):
    """Reads messages: one to a function is a call, and others in the channel "analysis" are reasoning.

    Other messages are text, or dropped if addressed to the assistant or a built-in tool.
    """

    marks = (START, CHANNEL, MESSAGE, *_ENDS)

    def __init__(self, tools: Sequence[FunctionTool] = ()) -> None:
        """Read calls of any function."""
        super().__init__(tools)
        self._has_shown: set[Callable[[str], None]] = set()
        """The methods that have shown a message's content."""

    def read(self) -> Reading[None]:
        """Read messages one by one. The prompt ends within the head of the first, after the role."""
        incoming, show = self.incoming, self.show_text
        if (yield from incoming.next_is(_TO)):
            show = yield from self._message("")
        while mark := (yield from incoming.until(_BETWEEN, show, leaves_part=show == self.show_arguments)):
            show = self.show_text if mark in _ENDS else (yield from self._message(mark))
        if show == self.show_arguments:
            incoming.rest()

    def _message(self, mark: str) -> Reading[Callable[[str], None]]:
        """Read a head that begins with a mark; return the method that shows the rest of its content."""
        head, is_head = yield from self._head(mark)
        if not is_head:
            if self.is_cut and not mark and not (yield from self.incoming.has(1)):
                return _drop  # the first head, with its mark in the prompt
            show = self._on_a_line(self.show_text)
            show(head)
            return show
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        to, channel = recipient[1] if recipient else "", channel[1] if channel else ""
        if self._is_function(to):
            self.start_call(to.removeprefix(_PREFIX))
            yield from self.incoming.skip_space()
            yield from self.incoming.json_value(self.show_arguments)
            return self.show_arguments
        if channel == "analysis":
            return self._on_a_line(self.show_reasoning)
        is_text = to in ("", _PREFIX) or channel == "final"
        return self._on_a_line(self.show_text) if is_text else _drop

    def _is_function(self, recipient: str) -> bool:
        if recipient in ("", _PREFIX):
            return False
        is_known = recipient.startswith(_PREFIX) or recipient in self.tools
        return is_known or recipient.partition(".")[0] not in _NO_FUNCTIONS

    def _on_a_line(self, show: Callable[[str], None]) -> Callable[[str], None]:
        """Return the method that shows a message's content, on a new line after others shown by it."""

        def show_content(text: str) -> None:
            nonlocal before
            show(before + text)
            before = ""
            self._has_shown.add(show)

        before = "\n" if show in self._has_shown else ""
        return show_content

    def _head(self, mark: str) -> Reading[tuple[str, bool]]:
        """Read a message's head before its content; return the text, and whether it is a head."""
        incoming = self.incoming
        start = incoming.trial()
        length = 0
        while length < _MAX_HEAD:
            part = yield from incoming.take_while(_HEAD, _MAX_HEAD)
            length += len(part)
            if (yield from incoming.take(MESSAGE)):
                return mark + incoming.settle(start), True
            tag = yield from incoming.take_any((CHANNEL, "<|constrain|>"))
            if tag is None:
                break
            length += len(tag)
        return mark + incoming.settle(start), False

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with at most one call, as the model makes, as `ToolParser.grammar` defines."""
        del parallel
        answers = [
            formats.sequence(
                formats.text(f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}"),
                formats.json_schema(tool.schema),
            )
            for tool in tools
        ]
        if not at_least_one:
            answers.append(final_message(formats.any_text()))
        return after_analysis(formats.either(*answers))


def _drop(text: str) -> None:
    """Show nothing."""
    del text


def final_message(content: dict[str, Any]) -> dict[str, Any]:
    """Return the format of the answer's message, with its content's format."""
    return formats.sequence(formats.text(f"{CHANNEL}final{MESSAGE}"), content)


def after_analysis(message: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a message with optional reasoning before it."""
    thoughts = formats.sequence(
        formats.tag(f"{CHANNEL}analysis{MESSAGE}", formats.any_text(), _ENDS[0]),
        formats.text(f"{START}assistant"),
    )
    return formats.sequence(formats.optional(thoughts), message)

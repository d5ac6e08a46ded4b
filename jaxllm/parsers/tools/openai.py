"""gpt-oss' harmony: an output is messages in channels, some of them to functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.parsers import formats
from jaxllm.parsers.function_tool import FunctionTool
from jaxllm.parsers.incoming import Reading
from jaxllm.parsers.tool_parser import ToolParser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = " to="
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")
_HEAD = re.compile(r"[^<{}\"]+")
_MAX_HEAD = 1000


class OpenAIParser(ToolParser):
    """This reads messages: the channel "analysis" is reasoning, a message to `functions.NAME` is a call of it, and any
    other one is text.
    """

    marks = (START, CHANNEL, MESSAGE, *ENDS)

    def read(self) -> Reading[None]:
        """Read one message after the other. The prompt ends within the head of the first, after the role."""
        incoming, show = self.incoming, self.show_text
        if (yield from incoming.next_is(_TO)):
            show = yield from self._message("")
        while mark := (yield from incoming.until((START, CHANNEL, *ENDS), show)):
            show = self.show_text if mark in ENDS else (yield from self._message(mark))

    def _message(self, mark: str) -> Reading[Callable[[str], None]]:
        """Read a head that begins with a mark, and the call if it is one; return what shows the text after that."""
        head = yield from self._head(mark)
        if head is None:
            return self.show_text
        function, channel = _FUNCTION.search(head), _CHANNEL.search(head)
        if function:
            self.start_call(function[1])
            yield from self.incoming.skip_space()
            if (yield from self.incoming.take_any(ENDS)):
                self.show_arguments("{}")
            else:
                yield from self.incoming.json_value(self.show_arguments)
        elif channel and channel[1] == "analysis":
            return self.show_reasoning
        return self.show_text

    def _head(self, mark: str) -> Reading[str | None]:
        """Read what a message says of itself before its content; None if that is none, which is text then."""
        incoming = self.incoming
        start = incoming.trial()
        length = 0
        while length < _MAX_HEAD:
            part = yield from incoming.take_while(_HEAD, _MAX_HEAD)
            length += len(part)
            if (yield from incoming.take(MESSAGE)):
                return mark + incoming.settle(start)
            tag = yield from incoming.take_any((CHANNEL, "<|constrain|>"))
            if tag is None:
                break
            length += len(tag)
        self.show_text(mark + incoming.settle(start))
        return None

    @classmethod
    def grammar(cls, tools: Sequence[FunctionTool], *, at_least_one: bool, parallel: bool) -> dict[str, Any]:
        """Return the format of outputs with calls, as `ToolParser.grammar` says: at most one, as the model makes."""
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


def final_message(content: dict[str, Any]) -> dict[str, Any]:
    """Return the format of the message that is the answer, with content of a format."""
    return formats.sequence(formats.text(f"{CHANNEL}final{MESSAGE}"), content)


def after_analysis(message: dict[str, Any]) -> dict[str, Any]:
    """Return the format of a message before which the model may have reasoned."""
    thoughts = formats.sequence(
        formats.tag(f"{CHANNEL}analysis{MESSAGE}", formats.any_text(), ENDS[0]),
        formats.text(f"{START}assistant"),
    )
    return formats.sequence(formats.optional(thoughts), message)

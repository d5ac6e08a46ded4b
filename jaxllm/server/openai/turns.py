"""One answer of a conversation, as every dialect of chat reads it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.output_parser import OutputParser
from jaxllm.parsers.pieces import CallStart, Piece, Reasoning, Text
from jaxllm.server.http.sse import EngineOutputs
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.utils.async_utils import threaded_if_long


class AnswerReader:
    """This takes apart the n answers to one request, each by a parser of its own.

    Give every `CompletionOutput` of theirs to `pieces`, once and in order.
    """

    def __init__(
        self,
        make_parser: Callable[[], OutputParser] | None = None,
        *,
        shows_reasoning: bool = True,
        is_named: bool = False,
        counted_by: Tokenizer | None = None,
    ) -> None:
        """Read with parsers that `make_parser` makes; None takes nothing apart.

        Unless the reader `shows_reasoning`, it drops it. With `is_named` the request named the function that is called.
        The tokenizer counts the tokens of the reasoning, where there may be any.
        """
        self._make_parser, self._parsers = make_parser, dict[int, OutputParser]()
        self._shows_reasoning, self._is_named = shows_reasoning, is_named
        self._tokenizer, self._reasoning = counted_by, defaultdict[int, list[str]](list)
        self._calling: set[int] = set()
        """The answers that have called a tool."""

    def pieces(self, output: CompletionOutput) -> list[Piece]:
        """Return what became certain of an answer with its next output; all that is left if it has ended."""
        if self._make_parser is None:
            return [Text(output.text)] if output.text else []
        parser = self._parsers.get(output.index)
        if parser is None:
            parser = self._parsers[output.index] = self._make_parser()
        pieces = parser.feed(output.text)
        if output.finish_reason is not None:
            pieces += parser.finish(is_cut=output.finish_reason == "length")
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._calling.add(output.index)
        if self._tokenizer is not None:
            self._reasoning[output.index] += [piece.text for piece in pieces if isinstance(piece, Reasoning)]
        return [piece for piece in pieces if self._shows_reasoning or not isinstance(piece, Reasoning)]

    async def num_reasoning_tokens(self) -> int | None:
        """Return how many tokens the reasoning of all answers has so far; None if there is never any."""
        if self._tokenizer is None:
            return None
        texts = list(map("".join, self._reasoning.values()))
        encoded = await threaded_if_long(sum(map(len, texts)), self._tokenizer.encode, texts, add_special_tokens=False)
        return sum(map(len, encoded))

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """Return why an answer has ended, in OpenAI's words, after its pieces were read; None if it has not.

        As with OpenAI, a call of the function that the request itself named is no reason of its own.
        """
        if output.finish_reason == "stop" and output.index in self._calling and not self._is_named:
            return "tool_calls"
        return output.finish_reason


class Turn:
    """The engine's outputs for one request as they come, and the reader of its answers."""

    def __init__(self, outputs: EngineOutputs, reader: AnswerReader) -> None:
        self.outputs, self.reader = outputs, reader
        self.pieces, self.finish_reason = reader.pieces, reader.finish_reason

    async def whole(self) -> RequestOutput:
        """Wait for the end of a request whose outputs are not streamed, and return its only output."""
        async with contextlib.aclosing(self.outputs):
            async for output in self.outputs:
                if output.finished:
                    return output
        raise AssertionError("a request's outputs ended before it did")

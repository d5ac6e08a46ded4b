"""Read the answer to a conversation as pieces, for all chat APIs."""

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
    """Parses the n answers to one request, each with its own parser.

    Pass every `CompletionOutput` to `pieces`, once and in order, or its text to `read`.
    """

    def __init__(
        self,
        make_parser: Callable[[], OutputParser] | None = None,
        *,
        shows_reasoning: bool = True,
        is_named: bool = False,
        counted_by: Tokenizer | None = None,
    ) -> None:
        """Read with parsers from `make_parser`; None parses nothing.

        Reasoning is dropped unless `shows_reasoning`. `is_named` means that the request named the function to call.
        `counted_by` counts the tokens of the reasoning, if there may be any.
        """
        self._make_parser, self._parsers = make_parser, dict[int, OutputParser]()
        self.shows_reasoning, self._is_named = shows_reasoning, is_named
        self._tokenizer, self._reasoning = counted_by, defaultdict[int, list[str]](list)
        self._calling: set[int] = set()
        """The answers that have called a tool."""

    @property
    def parses(self) -> bool:
        """Return whether answers are more than their text."""
        return self._make_parser is not None

    def pieces(self, output: CompletionOutput) -> list[Piece]:
        """Return the pieces that an answer's next output completes; all the rest if it has ended."""
        return self.read(output.index, output.text, output.finish_reason)

    def read(self, index: int, text: str, finish_reason: str | None = None) -> list[Piece]:
        """Return the pieces that the next text of the answer with an index completes; all the rest if it has ended."""
        pieces = self.parse(index, text, finish_reason)
        return [piece for piece in pieces if self.shows_reasoning or not isinstance(piece, Reasoning)]

    def parse(self, index: int, text: str, finish_reason: str | None = None) -> list[Piece]:
        """Return the same pieces with the reasoning, even if it is not shown."""
        if self._make_parser is None:
            return [Text(text)] if text else []
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._make_parser()
        pieces = parser.feed(text)
        if finish_reason is not None:
            pieces += parser.finish(is_cut=finish_reason == "length")
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._calling.add(index)
        if self._tokenizer is not None:
            self._reasoning[index] += [piece.text for piece in pieces if isinstance(piece, Reasoning)]
        return pieces

    async def num_reasoning_tokens(self) -> int | None:
        """Return the number of reasoning tokens of all answers so far; None if there is never any."""
        if self._tokenizer is None:
            return None
        texts = list(map("".join, self._reasoning.values()))
        encoded = await threaded_if_long(sum(map(len, texts)), self._tokenizer.encode, texts, add_special_tokens=False)
        return sum(map(len, encoded))

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """Return an answer's finish reason in OpenAI's terms, after its pieces were read; None if it has not ended.

        As with OpenAI, a call of the function that the request named is not a reason.
        """
        if output.finish_reason == "stop" and output.index in self._calling and not self._is_named:
            return "tool_calls"
        return output.finish_reason


class Turn:
    """The engine's outputs for one request, and the reader of its answers."""

    def __init__(self, outputs: EngineOutputs, reader: AnswerReader) -> None:
        self.outputs, self.reader = outputs, reader
        self.pieces, self.read, self.finish_reason = reader.pieces, reader.read, reader.finish_reason

    async def whole(self) -> RequestOutput:
        """Wait for the end of a request whose outputs are not streamed, and return its only output."""
        async with contextlib.aclosing(self.outputs):
            async for output in self.outputs:
                if output.finished:
                    return output
        raise AssertionError("a request's outputs ended before it did")

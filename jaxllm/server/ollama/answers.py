"""Make Ollama's answers: streamed lines of JSON, or one line with everything."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET

from jaxllm.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxllm.parsers.json_text import read_arguments
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from jaxllm.server.ollama.protocol import OllamaAnswer, OllamaMessage
from jaxllm.server.openai.logprobs import ChatTokenLogprob, chat_logprobs
from jaxllm.server.openai.turns import Turn

_encode = msgspec.json.Encoder().encode


class AnswerBuilder:
    """Makes the lines of one answer. Calls are shown once they are whole."""

    def __init__(self, model: str, *, is_chat: bool, num_logprobs: int | None = None) -> None:
        """Make lines in the form of chat or of generate, with a number of log-probabilities at each token."""
        self._model, self._is_chat, self._num_logprobs = model, is_chat, num_logprobs
        self._logprobs: list[ChatTokenLogprob] = []
        """The log-probabilities not shown yet."""
        self._begun = time.monotonic_ns()
        self._num_prompt, self._num_tokens = 0, 0
        self._call: list[str] | None = None
        """The name and arguments of the current call."""

    def empty(self) -> OllamaAnswer:
        """Return an empty line, which keeps the connection alive."""
        return self._line("", "", [], {})

    def loaded(self, *, is_unloaded: bool = False) -> OllamaAnswer:
        """Return the answer to a request without text, by which clients load a model, or unload it."""
        return self._line("", "", [], {"done": True, "done_reason": "unload" if is_unloaded else "load"})

    def whole(self, pieces: Iterable[Piece], output: CompletionOutput, of: RequestOutput) -> OllamaAnswer:
        """Return the whole answer."""
        return self._line(*self._read(pieces, output, of), self._end(output, of))

    def lines(self, pieces: Iterable[Piece], output: CompletionOutput, of: RequestOutput) -> Iterator[OllamaAnswer]:
        """Yield the lines of an output's pieces. The last line of an answer has no text, since clients stop at it."""
        text, thinking, calls = self._read(pieces, output, of)
        if text or thinking or calls:
            yield self._line(text, thinking, calls, {})
        if output.finish_reason is not None:
            yield self._line("", "", [], self._end(output, of))

    def text_line(self, pieces: Iterable[Piece]) -> bytes:
        """Return the line of a text's pieces, which end nothing; b"" if they show nothing."""
        text, thinking, calls = self._parts(pieces)
        return encode_line(self._line(text, thinking, calls, {})) if text or thinking or calls else b""

    def count(self, num_tokens: int) -> None:
        """Count tokens whose text was read by `text_line`."""
        self._num_tokens += num_tokens

    def _read(
        self, pieces: Iterable[Piece], output: CompletionOutput, of: RequestOutput
    ) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the text, the reasoning and the calls of an output's pieces."""
        self._num_prompt = self._num_prompt or len(of.prompt_token_ids or ())
        self._num_tokens += len(output.token_ids)
        if self._num_logprobs is not None and output.logprobs is not None:
            self._logprobs += chat_logprobs(output.token_ids, output.logprobs, self._num_logprobs).content
        text, thinking, calls = self._parts(pieces)
        if output.finish_reason is not None:
            text += self._end_call(calls, is_cut=output.finish_reason == "length")
        return text, thinking, calls

    def _parts(self, pieces: Iterable[Piece]) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the text, the reasoning and the whole calls in pieces."""
        text, thinking, calls = "", "", list[dict[str, Any]]()
        for piece in pieces:
            match piece:
                case Text():
                    text += piece.text
                case Reasoning():
                    thinking += piece.text
                case CallStart(_, name, _):
                    text += self._end_call(calls)
                    self._call = [name]
                case CallArguments(_, arguments):
                    assert self._call is not None
                    self._call.append(arguments)
        return text, thinking, calls

    def _end(self, output: CompletionOutput, of: RequestOutput) -> dict[str, Any]:
        """Return the last line's counts and times."""
        total, stats = time.monotonic_ns() - self._begun, of.metrics or RequestStateStats()
        first, all_others = stats.first_token_latency, stats.last_token_ts - stats.first_token_ts
        return {
            "done": True,
            "done_reason": "length" if output.finish_reason == "length" else "stop",
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": self._num_prompt,
            "prompt_eval_duration": int(first * 1e9),
            "eval_count": self._num_tokens,
            "eval_duration": max(1, int(all_others * 1e9)),  # clients divide by this
        }

    def _end_call(self, calls: list[dict[str, Any]], *, is_cut: bool = False) -> str:
        """Add the current call to `calls`, or return it as text if its arguments are not an object."""
        if self._call is None:
            return ""
        (name, *written), self._call = self._call, None
        arguments = "".join(written)
        values = read_arguments(arguments, is_cut=is_cut)
        if values is None:
            return f"{name} {arguments}"
        calls.append({"function": {"name": name, "arguments": values}})
        return ""

    def _line(self, text: str, thinking: str, calls: list[dict[str, Any]], end: dict[str, Any]) -> OllamaAnswer:
        shown: dict[str, Any] = {"response": text, "thinking": thinking or UNSET}
        if self._is_chat:
            shown = {"message": OllamaMessage(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET)}
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        logprobs, self._logprobs = self._logprobs or UNSET, []
        return OllamaAnswer(model=self._model, created_at=created, logprobs=logprobs, **shown, **end)


async def lines(turn: Turn, builder: AnswerBuilder, ping_seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer, and empty lines at an interval until it begins."""
    async for _ in turn.outputs.pings(ping_seconds):
        yield encode_line(builder.empty())
    turn.outputs.relay(lambda text: builder.text_line(turn.read(0, text)))
    async for output in turn.outputs:
        builder.count(turn.outputs.take_relayed())
        for completion in output.outputs:
            for line in builder.lines(turn.pieces(completion), completion, output):
                yield encode_line(line)


def encode_line(value: Any) -> bytes:
    """Return a value as a line."""
    return _encode(value) + b"\n"

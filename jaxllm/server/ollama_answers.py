"""Ollama's answers: lines of JSON that are streamed, or one of them that has all."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from jaxllm.server.protocol.ollama import OllamaAnswer, OllamaMessage
from jaxllm.server.turns import Turn

_encode = msgspec.json.Encoder().encode


class AnswerBuilder:
    """This makes the lines of one answer. Calls are shown once they are whole."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model, self._is_chat = model, is_chat
        self._begun, self._first = time.monotonic_ns(), 0
        self._num_prompt, self._num_tokens = 0, 0
        self._call: list[str] | None = None
        """The name and the arguments of a call that has begun."""

    def start(self, output: RequestOutput) -> None:
        """Take note of the first output."""
        self._first = time.monotonic_ns()
        self._num_prompt = len(output.prompt_token_ids or ())

    def add(
        self, pieces: Iterable[Piece], num_tokens: int, last: CompletionOutput | None = None
    ) -> OllamaAnswer | None:
        """Return the line of pieces that came with so many tokens, if they make one; `last` has ended the answer."""
        self._num_tokens += num_tokens
        text, thinking, calls = "", "", list[dict[str, Any]]()
        for piece in pieces:
            match piece:
                case Text():
                    text += piece.text
                case Reasoning():
                    thinking += piece.text
                case CallStart(_, name, _):
                    calls += self._take_call()
                    self._call = [name]
                case CallArguments(_, arguments):
                    assert self._call is not None
                    self._call.append(arguments)
        if last is not None:
            calls += self._take_call()
        if not (text or thinking or calls or last):
            return None
        return self._line(text, thinking, calls, last)

    def _take_call(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        (name, *arguments), self._call = self._call, None
        try:
            value = json.loads("".join(arguments))
        except (ValueError, RecursionError):  # the output was cut short
            value = {}
        return [{"function": {"name": name, "arguments": value if isinstance(value, dict) else {}}}]

    def _line(
        self, text: str, thinking: str, calls: list[dict[str, Any]], last: CompletionOutput | None
    ) -> OllamaAnswer:
        shown: dict[str, Any] = {"response": text, "thinking": thinking or UNSET}
        if self._is_chat:
            shown = {"message": OllamaMessage(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET)}
        if last is not None:
            now = time.monotonic_ns()
            shown |= {
                "done": True,
                "done_reason": "length" if last.finish_reason == "length" else "stop",
                "total_duration": now - self._begun,
                "load_duration": 0,
                "prompt_eval_count": self._num_prompt,
                "prompt_eval_duration": self._first - self._begun,
                "eval_count": self._num_tokens,
                "eval_duration": now - self._first,
            }
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return OllamaAnswer(model=self._model, created_at=created, **shown)


async def lines(turn: Turn, builder: AnswerBuilder) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer."""
    is_first = True
    async for output in turn.outputs:
        if is_first:
            builder.start(output)
        is_first = False
        for each in output.outputs:
            last = each if each.finish_reason is not None else None
            line = builder.add(turn.pieces(each), len(each.token_ids), last)
            if line is not None:
                yield encode_line(line)


def encode_line(value: Any) -> bytes:
    """Return a value as a line."""
    return _encode(value) + b"\n"

"""Make the events of Cohere's chat, and the whole message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from msgspec import UNSET

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from jaxllm.server.cohere.protocol import (
    CohereChatEvent,
    CohereChatResponse,
    CohereLogprobs,
    CohereMessage,
    CohereTokens,
    CohereUsage,
)
from jaxllm.server.http.sse import named_event
from jaxllm.server.openai.logprobs import chat_logprobs
from jaxllm.server.openai.turns import Turn
from jaxllm.server.openai.usage import PromptTokensDetails

_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}


class CohereMessageBuilder:
    """Makes the events of one message, and keeps the message."""

    def __init__(self, message_id: str, *, tells_cached: bool) -> None:
        self._id, self._tells_cached = message_id, tells_cached
        self._content: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._open: str | None = None
        """What is open: "text", "thinking", "call", or nothing."""
        self._logprobs: list[CohereLogprobs] = []
        self._num_shown = 0
        """The number of log-probabilities that events have shown."""
        self._num_prompt, self._num_tokens, self._num_cached = 0, 0, 0
        self._reason = "COMPLETE"

    def start(self, output: RequestOutput) -> list[CohereChatEvent]:
        """Return the events before the first block."""
        self._num_prompt = len(output.prompt_token_ids or ())
        self._num_cached = PromptTokensDetails.of(output).cached_tokens
        return [CohereChatEvent(type="message-start", id=self._id, delta={"message": {"role": "assistant"}})]

    def score(self, output: CompletionOutput) -> None:
        """Note the log-probabilities of an output, if they were requested."""
        if output.logprobs is not None:
            tokens = chat_logprobs(output.token_ids, output.logprobs, 0).content
            self._logprobs += [
                CohereLogprobs(token.token, [token_id], [token.logprob])
                for token_id, token in zip(output.token_ids, tokens, strict=True)
            ]

    def add(self, pieces: Iterable[Piece], num_tokens: int) -> list[CohereChatEvent]:
        """Return the events of pieces; `num_tokens` came with them."""
        self._num_tokens += num_tokens
        events: list[CohereChatEvent] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    events += self._grown("text", text)
                case Reasoning(text):
                    events += self._grown("thinking", text)
                case CallStart(_, name, call_id):
                    events += self._close()
                    self._open = "call"
                    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                    delta = {"message": {"tool_calls": {**call, "function": {"name": name, "arguments": ""}}}}
                    self._calls.append(call)
                    events.append(self._event("tool-call-start", delta))
                case CallArguments(_, text):
                    self._calls[-1]["function"]["arguments"] += text
                    delta = {"message": {"tool_calls": {"function": {"arguments": text}}}}
                    events.append(self._event("tool-call-delta", delta))
        return events

    def finish(self, output: CompletionOutput, reason: str | None) -> list[CohereChatEvent]:
        """Return the events that end the message; `reason` is OpenAI's."""
        self._reason = _REASONS.get(reason or "", "COMPLETE")
        if reason == "stop" and isinstance(output.stop_reason, str):
            self._reason = "STOP_SEQUENCE"
        delta = {"finish_reason": self._reason, "usage": self._usage()}
        return [*self._close(), CohereChatEvent(type="message-end", id=self._id, delta=delta)]

    def message(self) -> CohereChatResponse:
        """Return the whole answer, once it has ended."""
        return CohereChatResponse(
            id=self._id,
            finish_reason=self._reason,
            message=CohereMessage(role="assistant", content=self._content, tool_calls=self._calls),
            usage=self._usage(),
            logprobs=self._logprobs or UNSET,
        )

    def _usage(self) -> CohereUsage:
        tokens = CohereTokens(self._num_prompt, self._num_tokens)
        cached = self._num_cached if self._tells_cached else UNSET
        return CohereUsage(billed_units=tokens, tokens=tokens, cached_tokens=cached)

    def _grown(self, kind: str, text: str) -> list[CohereChatEvent]:
        """Add text to the content, to a new block unless one of this type is open; return the events."""
        events: list[CohereChatEvent] = []
        if self._open != kind:
            events = self._close()
            self._open = kind
            self._content.append({"type": kind, kind: ""})
            events.append(self._event("content-start", {"message": {"content": {"type": kind, kind: ""}}}))
        self._content[-1][kind] += text
        new, self._num_shown = self._logprobs[self._num_shown :], len(self._logprobs)
        scores = UNSET
        if new:
            token_ids = [token_id for each in new for token_id in each.token_ids]
            values = [value for each in new for value in each.logprobs]
            scores = CohereLogprobs("".join([each.text for each in new]), token_ids, values)
        delta = self._event("content-delta", {"message": {"content": {kind: text}}}, scores)
        return [*events, delta]

    def _close(self) -> list[CohereChatEvent]:
        """Return the event that ends what is open, if anything is."""
        kind = "tool-call-end" if self._open == "call" else "content-end"
        events = [] if self._open is None else [self._event(kind)]
        self._open = None
        return events

    def _event(self, kind: str, delta: Any = UNSET, logprobs: Any = UNSET) -> CohereChatEvent:
        """Return an event of what is open."""
        index = len(self._calls if self._open == "call" else self._content) - 1
        return CohereChatEvent(type=kind, index=index, delta=delta, logprobs=logprobs)


async def frames(turn: Turn, builder: CohereMessageBuilder, ping_seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a message's events."""
    async for ping in turn.outputs.pings(ping_seconds):
        yield ping
    turn.outputs.relay(lambda text: _frames(builder.add(turn.read(0, text), 0)))
    is_first = True
    async for output in turn.outputs:
        events = builder.start(output) if is_first else []
        is_first = False
        events += builder.add([], turn.outputs.take_relayed())
        for completion in output.outputs:
            builder.score(completion)
            events += builder.add(turn.pieces(completion), len(completion.token_ids))
            if completion.finish_reason is not None:
                events += builder.finish(completion, turn.finish_reason(completion))
        if events:
            yield _frames(events)


def failed_frame(message: str) -> bytes:
    """Return the last frame of a message that cannot go on."""
    return _frames([CohereChatEvent(type="message-end", delta={"error": message, "finish_reason": "ERROR"})])


def _frames(events: Iterable[CohereChatEvent]) -> bytes:
    return b"".join([named_event(event.type, event) for event in events])

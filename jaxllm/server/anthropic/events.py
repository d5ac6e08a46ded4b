"""Make the events of Anthropic's messages, and the whole message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.json_text import read_arguments
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from jaxllm.server.anthropic.protocol import MessagesResponse, MessagesUsage
from jaxllm.server.http.sse import named_event
from jaxllm.server.openai.turns import Turn
from jaxllm.server.openai.usage import PromptTokensDetails

_REASONS = {"length": "max_tokens"}
type Event = dict[str, Any]


class MessageBuilder:
    """Makes the events of one message, and keeps the message."""

    def __init__(self, message_id: str, model: str, *, tells_cached: bool) -> None:
        self._id, self._model, self._tells_cached = message_id, model, tells_cached
        self._blocks: list[dict[str, Any]] = []
        self._input = ""
        """The arguments of the latest call."""
        self._is_open = False
        self._num_prompt, self._num_tokens, self._prompt_details = 0, 0, PromptTokensDetails()
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def start(self, output: RequestOutput) -> list[Event]:
        """Return the events before the first block."""
        self._num_prompt = len(output.prompt_token_ids or ())
        if self._tells_cached:
            self._prompt_details = PromptTokensDetails.of(output)
        return [{"type": "message_start", "message": self.message()}, {"type": "ping"}]

    def add(self, pieces: Iterable[Piece], num_tokens: int) -> list[Event]:
        """Return the events of pieces; `num_tokens` came with them."""
        self._num_tokens += num_tokens
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    events += self._opened({"type": "text", "text": ""})
                    self._blocks[-1]["text"] += text
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text):
                    events += self._opened({"type": "thinking", "thinking": "", "signature": ""})
                    self._blocks[-1]["thinking"] += text
                    events.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case CallStart(_, name, call_id):
                    events += self._close()
                    events += self._opened({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    self._input += text
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def finish(self, output: CompletionOutput) -> list[Event]:
        """Return the events that end the message."""
        events = self._close(is_cut=output.finish_reason == "length")
        self._stop_reason = _REASONS.get(output.finish_reason or "", "end_turn")
        if isinstance(output.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", output.stop_reason
        elif self._stop_reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
            self._stop_reason = "tool_use"
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [*events, {"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}]

    def message(self) -> MessagesResponse:
        """Return the message so far."""
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=[dict(block) for block in self._blocks],
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessagesUsage:
        read, created = self._prompt_details.cached_tokens, self._prompt_details.created_cache_tokens or 0
        return MessagesUsage(
            input_tokens=self._num_prompt - read - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=read,
            output_tokens=self._num_tokens,
        )

    def _opened(self, block: dict[str, Any]) -> list[Event]:
        """Return the events that open a block of this type, unless the last block has it."""
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return []
        events = self._close()
        self._blocks.append(block)
        self._is_open, self._input = True, ""
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        return [*events, start]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self, *, is_cut: bool = False) -> list[Event]:
        """Return the events that end the last block, if it is open.

        Without streaming, a call whose arguments are not an object, as when the output `is_cut`, becomes text.
        """
        if not self._is_open:
            return []
        self._is_open = False
        block, events = self._blocks[-1], list[Event]()
        if block["type"] == "tool_use":
            block["input"] = read_arguments(self._input, is_cut=is_cut)
            if block["input"] is None:
                self._blocks[-1] = {"type": "text", "text": f"{block['name']} {self._input}"}
        elif block["type"] == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


async def frames(turn: Turn, builder: MessageBuilder, ping_seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a message's events."""
    async for _ in turn.outputs.pings(ping_seconds):
        yield named_event("ping", {"type": "ping"})
    turn.outputs.relay(lambda text: _frames(builder.add(turn.read(0, text), 0)))
    is_first = True
    async for output in turn.outputs:
        events = builder.start(output) if is_first else []
        is_first = False
        events += builder.add([], turn.outputs.take_relayed())
        for completion in output.outputs:
            events += builder.add(turn.pieces(completion), len(completion.token_ids))
            if completion.finish_reason is not None:
                events += builder.finish(completion)
        if events:
            yield _frames(events)


def _frames(events: Iterable[Event]) -> bytes:
    return b"".join([named_event(event["type"], event) for event in events])

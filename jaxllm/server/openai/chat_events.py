"""Make the events of a streamed chat answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial

from msgspec import UNSET

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from jaxllm.server.http.sse import TextFrame, event
from jaxllm.server.openai.chat_protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    DeltaMessage,
    FunctionCall,
    ToolCallDelta,
)
from jaxllm.server.openai.logprobs import chat_logprobs
from jaxllm.server.openai.turns import Turn
from jaxllm.server.openai.usage import PromptTokensDetails, UsageInfo, make_usage


class ChatEvents:
    """Makes events from outputs. Most are a text in a constant frame."""

    def __init__(
        self, request: ChatCompletionRequest, args: ServerArgs, answer_id: str, created: int, model: str, role: str
    ) -> None:
        self._request, self._role = request, role
        self._id, self._created, self._model = answer_id, created, model
        self._as_ids = request.shows_token_ids(args.return_tokens_as_token_ids)
        self._ping_seconds = args.sse_ping_interval
        self._tells_cached = args.enable_prompt_tokens_details
        self._ends_in_usage, self._has_usage = request.tells_usage(forced=args.enable_force_include_usage)
        self._is_plain = not (self._has_usage or request.logprobs or request.return_token_ids)
        self._frames: dict[tuple[int, type[Text | Reasoning]], TextFrame] = {}
        self._num_prompt_tokens, self._num_tokens = 0, 0
        self._prompt_details: PromptTokensDetails | None = None

    async def frames(self, turn: Turn) -> AsyncGenerator[bytes, None]:
        """Yield the frames of each output, and at the end the usage if requested."""
        async for ping in turn.outputs.pings(self._ping_seconds):
            yield ping
        if self._is_plain:
            turn.outputs.relay(partial(self._text, turn, 0) if turn.reader.parses else self._frame(0, Text).event)
        is_first = True
        async for output in turn.outputs:
            frames = self._open(output) if is_first else []
            is_first = False
            self._num_tokens += turn.outputs.take_relayed()
            for completion in output.outputs:
                self._num_tokens += len(completion.token_ids)
                if self._is_plain and completion.finish_reason is None:
                    frames.append(self._text(turn, completion.index, completion.text))
                else:
                    frames.append(self._whole(turn, completion))
            if output.finished and self._ends_in_usage:
                frames.append(event(self._chunk([], self._usage(await turn.reader.num_reasoning_tokens()))))
            if piece := b"".join(frames):
                yield piece

    def _text(self, turn: Turn, index: int, text: str) -> bytes:
        """Return the frame of a text that ends nothing, b"" if it completes no piece."""
        pieces = turn.read(index, text)
        match pieces:
            case []:
                return b""
            case [(Text() | Reasoning()) as piece]:
                return self._frame(index, type(piece)).event(piece.text)
            case _:
                choice = ChatCompletionResponseStreamChoice(index=index, delta=_delta(pieces))
                return event(self._chunk([choice]))

    def _whole(self, turn: Turn, completion: CompletionOutput) -> bytes:
        """Return the frame of an output with all that is shown of it."""
        pieces = turn.pieces(completion)
        return event(self._chunk([self._choice(completion, pieces, turn.finish_reason(completion))]))

    def _open(self, output: RequestOutput) -> list[bytes]:
        """Return the beginning of each of the n answers: its role, and with `echo` the text that it continues."""
        prompt_ids = output.prompt_token_ids or []
        self._num_prompt_tokens = len(prompt_ids)
        self._prompt_details = PromptTokensDetails.of(output) if self._tells_cached else None
        request, opening = self._request, DeltaMessage(role=self._role, content="")
        chunks = [
            self._chunk(
                [ChatCompletionResponseStreamChoice(index=i, delta=opening)],
                prompt_ids=prompt_ids if request.return_token_ids else None,
                prompt_text=output.prompt if request.return_prompt_text else None,
            )
            for i in range(request.n or 1)
        ]
        if echoed := request.echoed(self._role):
            delta = DeltaMessage(content=echoed)
            chunks += [
                self._chunk([ChatCompletionResponseStreamChoice(index=i, delta=delta)]) for i in range(request.n or 1)
            ]
        return [event(chunk) for chunk in chunks]

    def _choice(
        self, output: CompletionOutput, pieces: Sequence[Piece], finish_reason: str | None
    ) -> ChatCompletionResponseStreamChoice:
        request, logprobs = self._request, None
        if request.logprobs and output.logprobs:
            logprobs = chat_logprobs(output.token_ids, output.logprobs, request.num_logprobs, as_token_ids=self._as_ids)
        return ChatCompletionResponseStreamChoice(
            index=output.index,
            delta=_delta(pieces),
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=UNSET if output.finish_reason is None else output.stop_reason,
            token_ids=list(output.token_ids) if request.return_token_ids else UNSET,
        )

    def _frame(self, index: int, kind: type[Text | Reasoning]) -> TextFrame:
        frame = self._frames.get((index, kind))
        if frame is None:
            frame = self._frames[index, kind] = TextFrame.of(lambda text: self._chunk([_choice_of(index, kind(text))]))
        return frame

    def _chunk(
        self,
        choices: list[ChatCompletionResponseStreamChoice],
        usage: UsageInfo | None = None,
        prompt_ids: list[int] | None = None,
        prompt_text: str | None = None,
    ) -> ChatCompletionStreamResponse:
        if usage is None and self._has_usage:
            usage = self._usage()
        return ChatCompletionStreamResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=UNSET if usage is None else usage,
            prompt_token_ids=UNSET if prompt_ids is None else prompt_ids,
            prompt_text=UNSET if prompt_text is None else prompt_text,
        )

    def _usage(self, num_reasoning_tokens: int | None = None) -> UsageInfo:
        return make_usage(self._num_prompt_tokens, self._num_tokens, self._prompt_details, num_reasoning_tokens)


def _delta(pieces: Sequence[Piece]) -> DeltaMessage:
    """Return the delta of a message."""
    text, reasoning, calls = [], [], []
    for piece in pieces:
        match piece:
            case Text():
                text.append(piece.text)
            case Reasoning():
                reasoning.append(piece.text)
            case CallStart(index, name, call_id):
                function = FunctionCall(name=name, arguments="")
                calls.append(ToolCallDelta(index=index, id=call_id, type="function", function=function))
            case CallArguments(index, arguments):
                calls.append(ToolCallDelta(index=index, function=FunctionCall(arguments=arguments)))
    thoughts = "".join(reasoning) if reasoning else UNSET
    return DeltaMessage(
        content="".join(text) if text or not (reasoning or calls) else UNSET,
        reasoning=thoughts,
        reasoning_content=thoughts,
        tool_calls=calls or UNSET,
    )


def _choice_of(index: int, piece: Piece) -> ChatCompletionResponseStreamChoice:
    return ChatCompletionResponseStreamChoice(index=index, delta=_delta([piece]))

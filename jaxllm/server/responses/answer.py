"""Make a response from the answer to a request: whole, as a stream of events, or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from jaxllm.outputs import RequestOutput
from jaxllm.server.http.errors import error_response
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.turns import Turn
from jaxllm.server.openai.usage import PromptTokensDetails
from jaxllm.server.responses.events import ResponseBuilder, frame
from jaxllm.server.responses.logprobs import ScoredReader
from jaxllm.server.responses.objects import (
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from jaxllm.server.responses.stream import Event


class ResponseAnswer:
    """Reads a turn's outputs once, with one of `whole`, `frames` and `run`."""

    def __init__(
        self,
        response: Response,
        turn: Turn,
        chat: OpenAIServingChat,
        keep: Callable[[Response], None],
        num_logprobs: int | None = None,
    ) -> None:
        """Fill a response without output from a turn of `chat`; `keep` gets it once it has ended.

        Texts have their tokens, with `num_logprobs` likely ones at each, unless it is None.
        """
        self._builder, self._turn, self._chat, self._keep = ResponseBuilder(response), turn, chat, keep
        self._scored: ScoredReader | None = None
        if num_logprobs is not None:
            as_ids = chat.args.return_tokens_as_token_ids
            self._scored = ScoredReader(turn.reader, num_logprobs, as_token_ids=as_ids)
        self._num_prompt_tokens, self._num_tokens, self._prompt_details = 0, 0, PromptTokensDetails()
        self._finish_reason: str | None = None

    def response(self) -> Response:
        """Return the current response."""
        return self._builder.response()

    async def whole(self) -> Response:
        """Return the whole response. Raises what ended the request."""
        self._take(await self._turn.whole())
        await self._end()
        self._keep(self.response())
        return self.response()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of the response's events, errors included, and comments while there are none."""
        yield _frames(self._builder.begin())
        try:
            async for ping in self._turn.outputs.pings(self._chat.args.sse_ping_interval):
                yield ping
            if self._scored is None:
                self._turn.outputs.relay(lambda text: _frames(self._builder.add(self._turn.read(0, text))))
            async for output in self._turn.outputs:
                if events := self._take(output):
                    yield _frames(events)
            last = await self._end()
        except Exception as error:  # noqa: BLE001 - each has an answer
            last = self._builder.fail(_told(error))
        self._keep(self.response())
        yield _frames(last)

    def queue(self) -> list[Event]:
        """Return the first events of a response that `run` makes."""
        return self._builder.queue()

    async def run(self, tell: Callable[[list[Event]], None]) -> None:
        """Make the response in the background from a streamed answer, and `tell` the events.

        Cancelling it ends the request.
        """
        try:
            async with contextlib.aclosing(self._turn.outputs) as outputs:
                async for output in outputs:
                    tell([*self._builder.proceed(), *self._take(output)])
            last = await self._end()
        except asyncio.CancelledError:
            last = self._builder.fail(None)
        except Exception as error:  # noqa: BLE001 - each has an answer
            last = self._builder.fail(_told(error))
        tell(last)
        self._keep(self.response())

    def _take(self, output: RequestOutput) -> list[Event]:
        """Add an output to the response."""
        self._num_prompt_tokens = len(output.prompt_token_ids or ()) or self._num_prompt_tokens
        if self._chat.args.enable_prompt_tokens_details:
            self._prompt_details = PromptTokensDetails.of(output)
        events: list[Event] = []
        self._num_tokens += self._turn.outputs.take_relayed()
        for completion in output.outputs:
            self._num_tokens += len(completion.token_ids)
            read = self._turn.pieces if self._scored is None else self._scored.pieces
            events += self._builder.add(read(completion))
            self._finish_reason = self._turn.finish_reason(completion)
        return events

    async def _end(self) -> list[Event]:
        num_reasoning = min(await self._turn.reader.num_reasoning_tokens() or 0, self._num_tokens)
        usage = ResponseUsage(
            input_tokens=self._num_prompt_tokens,
            input_tokens_details=InputTokensDetails(
                self._prompt_details.cached_tokens, self._prompt_details.created_cache_tokens or 0
            ),
            output_tokens=self._num_tokens,
            output_tokens_details=OutputTokensDetails(num_reasoning),
            total_tokens=self._num_prompt_tokens + self._num_tokens,
        )
        return self._builder.end(self._finish_reason, usage, int(time.time()))


def _frames(events: list[Event]) -> bytes:
    return b"".join(map(frame, events))


def _told(error: Exception) -> ResponseError:
    """Return the error that a client gets for what ended its response."""
    return ResponseError("server_error", error_response(error).error.message)

"""Run the requests of one sound on an engine, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

from jaxllm.core_messages import Alignment
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError
from jaxllm.outputs import RequestOutput
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.sse import EngineOutputs
from jaxllm.speech.transcription import AlignAsk, Ask, Transcription

_BUSY_SECONDS = 0.1
"""The pause before a sound that has begun asks a full engine again."""

type Opening = asyncio.Task[EngineOutputs]


class SpeechRequests:
    """Queues requests for one sound. The first one is refused by an engine that is full; later ones wait for room."""

    def __init__(self, engine: AsyncLLM, caller: Caller) -> None:
        self._engine, self._caller = engine, caller
        self._most = engine.vllm_config.scheduler_config.max_num_seqs
        """The most requests at once: more would not run sooner, and others' requests would wait for them."""
        self._has_begun = False
        self._aligns = asyncio.Lock()
        """Words of one clip get their times at a time: steps go on meanwhile."""

    async def find_language(self, transcription: Transcription) -> None:
        """Find out which language is spoken, unless it is known."""
        if transcription.language is None and isinstance(ask := transcription.next_ask(), Ask):
            transcription.take(ask.number, await self._final(await self.open(ask)))

    async def finish(self, transcription: Transcription) -> None:
        """Run all requests. Raises what ends one of them, and aborts the others then, as it does when cancelled."""
        await self.find_language(transcription)
        running: dict[asyncio.Task[RequestOutput | Alignment], int] = {}
        try:
            while not transcription.is_done:
                while len(running) < self._most and (ask := transcription.next_ask()) is not None:
                    if isinstance(ask, AlignAsk):
                        running[asyncio.create_task(self._align(ask))] = ask.number
                        continue
                    outputs = None if self._has_begun else await self.open(ask)
                    running[asyncio.create_task(self._run(ask, outputs))] = ask.number
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    transcription.take(running.pop(task), task.result())
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def stream(self, first: Opening, transcription: Transcription) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of all clips in order, while later ones run; `first` opens the first clip's request."""
        openings = deque([first])
        try:
            while openings:
                while len(openings) < self._most and isinstance(ask := transcription.next_ask(), Ask):
                    openings.append(asyncio.create_task(self.open(ask)))
                async for output in await openings[0]:
                    yield output
                openings.popleft()
        finally:
            for opening in openings:
                opening.cancel()
            for outputs in await asyncio.gather(*openings, return_exceptions=True):
                if isinstance(outputs, EngineOutputs):
                    await outputs.aclose()

    async def open(self, ask: Ask) -> EngineOutputs:
        """Queue a request and return its outputs, which must be closed."""
        while True:
            try:
                stream = await self._engine.add_request(
                    f"{self._caller.request_id}-{ask.number}",
                    ask.prompt,
                    ask.params,
                    trace_headers=self._caller.trace_headers,
                    data_parallel_rank=self._caller.data_parallel_rank,
                )
            except EngineBusyError:
                if not self._has_begun:
                    raise
                await asyncio.sleep(_BUSY_SECONDS)
            else:
                self._has_begun = True
                return EngineOutputs(self._engine, stream)

    async def _align(self, ask: AlignAsk) -> Alignment:
        async with self._aligns:
            return await self._engine.align(ask.prompt, ask.token_ids)

    async def _run(self, ask: Ask, outputs: EngineOutputs | None) -> RequestOutput | Alignment:
        if outputs is None:
            outputs = await self.open(ask)
        del ask  # which has the clip's samples
        return await self._final(outputs)

    async def _final(self, outputs: EngineOutputs) -> RequestOutput:
        """Return a request's last output. Raises EngineGenerateError if the engine could not go on with it."""
        final: RequestOutput | None = None
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                final = output
        assert final is not None
        return final

"""Run several engine requests for one answer: all are queued, or none, and if one fails the others are aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.request_stream import RequestOutputCollector
from jaxllm.outputs import RequestOutput
from jaxllm.server.http.sse import EngineOutputs


async def queue_all(engine: AsyncLLM, requests: Iterable[Awaitable[RequestOutputCollector]]) -> list[EngineOutputs]:
    """Await the calls of `add_request` one by one; return the outputs of each, which must be closed.

    If one is refused, those before it are aborted.
    """
    queued: list[EngineOutputs] = []
    try:
        for request in requests:
            queued.append(EngineOutputs(engine, await request))
            await asyncio.sleep(0)  # let other requests run after each prompt is tokenized
    except BaseException:
        for outputs in queued:
            await outputs.aclose()
        raise
    return queued


async def read_all(outputs: Sequence[EngineOutputs]) -> list[RequestOutput]:
    """Return the final output of each request. If one fails, or the caller is cancelled, all are aborted."""
    try:
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(_read(each)) for each in outputs]
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None
    finally:
        for stream in outputs:
            await stream.aclose()
    return [reader.result() for reader in readers]


async def merge(outputs: Sequence[EngineOutputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of several requests as they come, each with its request's number."""
    waiting = {asyncio.ensure_future(each.__anext__()): i for i, each in enumerate(outputs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number, output = waiting.pop(task), task.result()
                if not output.finished:
                    waiting[asyncio.ensure_future(outputs[number].__anext__())] = number
                yield number, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _read(outputs: EngineOutputs) -> RequestOutput:
    final: RequestOutput | None = None
    async for output in outputs:
        final = output
    assert final is not None
    return final

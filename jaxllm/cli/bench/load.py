"""Send requests to a server at their times, with bounded concurrency, and time their streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from jaxllm.cli.bench.datasets import Sample
from jaxllm.cli.bench.figures import Result
from jaxllm.cli.client.openai_client import Chunk, OpenAIClient, RequestError

_RETRY_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """An endpoint, and the contents of each request besides the prompt."""

    client: OpenAIClient
    endpoint: str
    is_chat: bool
    model: str
    extra: Mapping[str, Any]
    """Fields of every request; they override the others."""

    def body(self, sample: Sample) -> dict[str, Any]:
        """Return the body of a request."""
        if self.is_chat:
            prompt = {
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.output_len,
            }
        else:
            prompt = {"prompt": sample.prompt, "max_tokens": sample.output_len}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **prompt, **options, **self.extra}

    async def ask(
        self, sample: Sample, count: Callable[[str], int], headers: Mapping[str, str] | None = None
    ) -> Result:
        """Make one request; any failure becomes the result's error."""
        return await time_stream(self.client.stream(self.endpoint, self.body(sample), headers), sample, count)


async def time_stream(
    chunks: AsyncGenerator[Chunk, None],
    sample: Sample,
    count: Callable[[str], int],
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Read a stream to its end and time it; `count` counts a text's tokens if the server reports none."""
    start = clock()
    result = Result(start=start, prompt_len=sample.prompt_len)
    texts: list[str] = []
    num_tokens: int | None = None
    last: float | None = None
    try:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.usage is not None:
                    result.prompt_len = chunk.usage.prompt_tokens or sample.prompt_len
                    num_tokens = chunk.usage.completion_tokens
                added = "".join([choice.added for choice in chunk.choices])
                if not added:
                    continue
                now = clock()
                if last is None:
                    result.ttft = now - start
                else:
                    result.itl.append(now - last)
                last = now
                texts.append(added)
    except RequestError as error:
        result.error = str(error)
    result.latency = clock() - start
    result.text = "".join(texts)
    result.output_len = count(result.text) if num_tokens is None else num_tokens
    if last is None:  # a token may have no text of its own
        result.ttft = result.latency
        if not result.output_len and result.error is None:
            result.error = "the answer is empty"
    return result


async def send_all(
    target: Target,
    samples: Sequence[Sample],
    times: Sequence[float],
    *,
    max_concurrency: int | None,
    count: Callable[[str], int],
    advance: Callable[[], object],
    id_prefix: str | None = None,
) -> list[Result]:
    """Send each request at its time, in seconds from now, or as soon as fewer than `max_concurrency` are in progress.

    Returns the results in the requests' order. `advance` is called at the end of each.
    """
    places = asyncio.Semaphore(max_concurrency or len(samples))
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def send(i: int) -> Result:
        headers = None if id_prefix is None else {"X-Request-Id": f"{id_prefix}{i}"}
        async with places:
            result = await target.ask(samples[i], count, headers)
        advance()
        return result

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Result]] = []
        for i, moment in enumerate(times):
            wait = begin + moment - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send(i)))
    return [task.result() for task in tasks]


async def wait_ready(target: Target, sample: Sample, count: Callable[[str], int], seconds: float) -> None:
    """Repeat a request until it is answered. Raises RequestError after the timeout."""
    deadline = time.monotonic() + seconds
    while (result := await target.ask(sample, count)).error is not None:
        if time.monotonic() > deadline:
            raise RequestError(f"the server was not ready in {seconds:g} s: {result.error}")
        await asyncio.sleep(_RETRY_SECONDS)

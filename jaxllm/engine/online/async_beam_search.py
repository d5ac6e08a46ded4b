"""Beam search on an asynchronous engine: the searcher's requests run among all others, and their outputs drive it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from jaxllm.beam_search import BeamSearchSequence
from jaxllm.engine.beam.search import BeamSearcher
from jaxllm.engine.client.replicated_core import for_replica
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.growing_request import placeholder_ranges
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.engine.online.async_core import AsyncCore
from jaxllm.engine.online.gate import Flag
from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import BeamSearchParams


class _Search:
    """One search: the engine of its searcher, the reader of all its requests, and what the user's id stands for."""

    def __init__(
        self, front: FrontEnd, requests: RunningRequests, core: Callable[[], AsyncCore], params: BeamSearchParams
    ) -> None:
        """Check the params. Raises VLLMValidationError for those that this engine cannot search by."""
        self._requests, self._core = requests, core
        self._outputs: deque[RequestOutput | Exception] = deque()
        """The outputs of the search's requests, and the errors that have ended them."""
        self._has_news = Flag()
        self.searcher = BeamSearcher(self, front, params, None)

    async def run(self, request: ProcessedRequest) -> None:
        """Search until the end, or until `end` is called. Raises the error that has ended a request."""
        loop, seen = asyncio.get_running_loop(), set()
        self.searcher.start([request])
        while not self.searcher.is_done:
            for future in self.searcher.masks:
                if future not in seen:  # done in a thread of the grammars
                    seen.add(future)
                    future.add_done_callback(lambda _: self._wake_from_thread(loop))
            await self._has_news.wait()
            self._has_news.clear()
            while self._outputs:
                output = self._outputs.popleft()
                if isinstance(output, Exception):
                    raise copy.copy(output)
                self.searcher.take(output)
            self.searcher.resume(wait=False)

    def end(self) -> None:
        """End the search where it is; what it has so far is its result."""
        self.searcher.stop()
        self._has_news.set()

    def enqueue(self, request: ProcessedRequest) -> None:
        """Queue a request that is complete."""
        self._requests.add(request, self, None)
        try:
            self._core().remote.add_request(request.core)
        except BaseException:
            self.abort_request([request.request_id])
            raise

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests; their last outputs come to nobody."""
        for request_id in request_ids:
            self._core().abort_requests(self._requests.abort(request_id))

    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks; unknown ids are ignored."""
        self._core().release(request_ids)

    def put(self, output: RequestOutput | Exception) -> None:
        """Take in an output, or the error that has ended a request."""
        self._outputs.append(output)
        self._has_news.set()

    def admit(self) -> None:
        """Do nothing: the requests of a search carry masks, no grammars."""

    def _wake_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._has_news.set)


async def search_beams(
    front: FrontEnd,
    requests: RunningRequests,
    enter: Callable[[], Awaitable[object]],
    core: Callable[[], AsyncCore],
    request_id: str,
    prompt: Any,
    params: BeamSearchParams,
    trace_headers: Mapping[str, str] | None = None,
    lora_request: Any = None,
    data_parallel_rank: int | None = None,
) -> RequestOutput:
    """Run one search, after `enter`, and return its sequences, best first; it counts as `beam_width` requests.

    Raises VLLMValidationError for what cannot be searched. When the caller is cancelled, the search leaves nothing;
    when its id is aborted, it returns what it has.
    """
    search, adapter = _Search(front, requests, core, params), front.inputs.check_adapter(lora_request)
    reservation = requests.reserve(params.beam_width)
    try:
        if params.structured_outputs is not None:
            await asyncio.to_thread(lambda: front.grammars)  # its first use loads numpy and llguidance
        sampling_params = front.inputs.resolve(search.searcher.sampling_params)
        encoded = await encode_prompt(front.inputs, prompt)
        await enter()
        with requests.hold(request_id, search):
            request = front.inputs.complete(
                request_id, encoded, sampling_params, trace_headers=trace_headers, adapter=adapter
            )
            core_request = for_replica(request.core, core().remote, data_parallel_rank)
            await search.run(dataclasses.replace(request, core=core_request))
    finally:
        reservation.release()
        search.searcher.abort()
    prefix = ""
    if front.tokenizer is not None:
        prefix = front.tokenizer.decode(encoded.token_ids, skip_special_tokens=params.skip_special_tokens)
    sequences = search.searcher.outputs()[0].sequences
    completions = [_completion(i, each, len(encoded.token_ids), len(prefix)) for i, each in enumerate(sequences)]
    return RequestOutput(
        request_id,
        encoded.text,
        encoded.token_ids,
        None,
        completions,
        finished=True,
        lora_request=adapter,
        multi_modal_placeholders=placeholder_ranges(encoded.media),
    )


def _completion(
    index: int, sequence: BeamSearchSequence, num_prompt_tokens: int, num_prompt_characters: int
) -> CompletionOutput:
    """Return the part of a sequence after the prompt, which its tokens and text begin with."""
    return CompletionOutput(
        index=index,
        text=(sequence.text or "")[num_prompt_characters:],
        token_ids=sequence.tokens[num_prompt_tokens:],
        cumulative_logprob=sequence.cum_logprob,
        logprobs=sequence.logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )

"""Beam search on an asynchronous engine: the searcher's requests run among all others, and their outputs drive it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from jaxllm.beam_search import BeamSearchSequence
from jaxllm.engine.async_core import AsyncCore
from jaxllm.engine.beam_search import BeamSearcher
from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine.input_processor import ProcessedRequest
from jaxllm.engine.running_requests import RunningRequests
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import BeamSearchParams


class _Beams:
    """The engine of one search, and the reader of all its requests."""

    def __init__(self, requests: RunningRequests, core: AsyncCore) -> None:
        self._requests, self._core = requests, core
        self.outputs: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        """The outputs of the search's requests, their errors, and None when something else has come."""

    def enqueue(self, request: ProcessedRequest) -> None:
        """Queue a request that is complete."""
        self._requests.add(request, self, None)
        self._core.remote.add_request(request.core)

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests; their last outputs come to nobody."""
        for each in request_ids:
            self._core.abort_requests(self._requests.abort(each))

    def release(self, request_ids: Iterable[str]) -> None:
        """Give up the blocks that ended requests have kept for forks; unknown ids are ignored."""
        self._core.release(request_ids)

    def put(self, output: RequestOutput | Exception) -> None:
        """Take in an output, or the error that has ended a request."""
        self.outputs.put_nowait(output)

    def admit(self) -> None:
        """Do nothing: the requests of a search carry masks, no grammars."""


async def search_beams(
    front: FrontEnd,
    requests: RunningRequests,
    core: AsyncCore,
    request_id: str,
    prompt: Any,
    params: BeamSearchParams,
) -> RequestOutput:
    """Run one search and return what it has found, best first; it counts as `beam_width` requests.

    Raises VLLMValidationError for what cannot be searched. When the caller is cancelled, the search leaves nothing.
    """
    beams = _Beams(requests, core)
    searcher = BeamSearcher(beams, front, params, None)
    place = requests.reserve(params.beam_width)
    try:
        if params.structured_outputs is not None:
            await asyncio.to_thread(lambda: front.grammars)  # its first use loads numpy and llguidance
        sampling_params = front.inputs.resolve(searcher.sampling_params)
        encoded = await requests.encode(prompt)
        # A number of its own in the ids of its requests, whatever ids the others have.
        request = front.inputs.complete(f"{request_id}/beams", encoded, sampling_params)
        core.attach()
        await _run(searcher, beams, request)
    finally:
        place.release()
        searcher.abort()
    prefix = ""
    if front.tokenizer is not None:
        prefix = front.tokenizer.backend.decode(encoded.token_ids, skip_special_tokens=params.skip_special_tokens)
    sequences = searcher.outputs()[0].sequences
    found = [_completion(i, each, len(encoded.token_ids), len(prefix)) for i, each in enumerate(sequences)]
    return RequestOutput(request_id, encoded.text, encoded.token_ids, None, found, finished=True)


async def _run(searcher: BeamSearcher, beams: _Beams, request: ProcessedRequest) -> None:
    loop, seen = asyncio.get_running_loop(), set()
    searcher.start([request])
    while not searcher.is_done:
        for future in searcher.masks:
            if future not in seen:  # done in a thread of the grammars
                seen.add(future)
                future.add_done_callback(lambda _: loop.call_soon_threadsafe(beams.outputs.put_nowait, None))
        output = await beams.outputs.get()
        if isinstance(output, Exception):
            raise output
        if output is not None:
            searcher.take(output)
        searcher.resume(wait=False)


def _completion(
    index: int, sequence: BeamSearchSequence, num_prompt_tokens: int, num_prompt_characters: int
) -> CompletionOutput:
    """Return what a sequence has beyond the prompt, with which its own tokens and text begin."""
    return CompletionOutput(
        index=index,
        text=(sequence.text or "")[num_prompt_characters:],
        token_ids=sequence.tokens[num_prompt_tokens:],
        cumulative_logprob=sequence.cum_logprob,
        logprobs=sequence.logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )

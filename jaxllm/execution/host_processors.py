"""Run logits processors that are classes: the step calls the host, which runs them on numpy arrays.

The step stays one program, with one call for all processors that run before the penalties and one for those that run
after. Steps do not overlap, so that every output token is on the host before the next step needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import io_callback

from jaxllm.exceptions import VLLMValidationError
from jaxllm.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality, MovedRequest
from jaxllm.sampling.distribution import GREEDY_TEMPERATURE
from jaxllm.sampling.processors import PARAMETER, LogitsState
from jaxllm.sampling.processors import LogitsProcessor as TracedProcessor
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import Chunk

_WAY_OUT = (
    "A class gets float32 numpy arrays on the host, and no torch; or write the same in jnp, as a function: "
    "`def process(logits_sv, state): return logits_sv` (docs/sampling.md)"
)


class _Request:
    """The part of a running request that processors see."""

    __slots__ = ("output_ids", "params", "prompt_ids")

    def __init__(self, chunk: Chunk, token_ids: Sequence[int]) -> None:
        self.params: SamplingParams = chunk.params
        self.prompt_ids = list(token_ids[: chunk.owner.num_prompt_tokens])
        self.output_ids = list(token_ids[chunk.owner.num_prompt_tokens :])


class HostProcessors:
    """One object of each processor class, and the assignment of requests to the processors' rows."""

    def __init__(self, classes: Sequence[type[LogitsProcessor]], vllm_config: Any) -> None:
        """Make one object of each class. Raises VLLMValidationError if one cannot be made."""
        self._all = [_call(each, each, vllm_config, "cpu", False) for each in classes]
        invariant = [bool(_call(type(each), each.is_argmax_invariant)) for each in self._all]
        self._first = [each for each, is_last in zip(self._all, invariant, strict=True) if not is_last]
        self._last = [each for each, is_last in zip(self._all, invariant, strict=True) if is_last]
        self._running: dict[int, _Request] = {}
        """The running requests by their rows of the token counts; a row is reused once its request has ended."""
        self._batch: list[_Request] = []
        """The requests of the step in the order of the processors' rows."""
        self._rows = np.zeros(0, np.int64)
        """The row of the step's logits of each request of `_batch`."""
        self._error: VLLMValidationError | None = None

    def traced(self) -> list[TracedProcessor]:
        """Return the functions that the step calls, as traced processors; those that run last are marked."""
        functions: list[TracedProcessor] = []
        if self._first:
            functions.append(partial(_call_host, self._apply_first))
        if self._last:
            functions.append(partial(_call_host, self._apply_last))
            functions[-1].runs_last = True  # pyright: ignore[reportFunctionMemberAccess]
        return functions

    def before_step(self, chunks: Sequence[Chunk]) -> None:
        """Tell the processors about the next step's rows. Raises VLLMValidationError if one fails."""
        self._error = None
        rows = {self._request_of(chunk): row for row, chunk in enumerate(chunks)}
        update = _update(self._batch, list(rows))
        self._rows = np.array([rows[request] for request in self._batch], np.int64)
        for processor in self._all:
            _call(type(processor), processor.update_state, update)

    def after_step(self) -> None:
        """Raise what a processor raised during the step."""
        if self._error is not None:
            raise self._error

    def _request_of(self, chunk: Chunk) -> _Request:
        """Return the request of a chunk, with all output tokens that come before this step."""
        row = chunk.owner.count_row
        if row is None:
            raise RuntimeError("a request without token counts: this is a bug in jaxllm")
        if chunk.history is not None:  # it has just got the row
            self._running[row] = _Request(chunk, chunk.history.tolist())
        request = self._running[row]
        num_new = chunk.num_output_tokens - len(request.output_ids)
        if num_new > 0:
            request.output_ids += chunk.token_ids[-num_new:].tolist()
        return request

    def _apply_first(self, logits_sv: Any) -> np.ndarray:
        return self._apply(self._first, logits_sv, np.ones(len(self._batch), np.float32))

    def _apply_last(self, logits_sv: Any) -> np.ndarray:
        return self._apply(self._last, logits_sv, np.array([each.params.temperature for each in self._batch]))

    def _apply(self, processors: Sequence[LogitsProcessor], logits_sv: Any, temperature_n: np.ndarray) -> np.ndarray:
        """Return the logits after the processors, which see each row divided by its temperature.

        Rows of greedy requests and of prompt tokens are not divided. `after_step` raises an error that occurs.
        """
        edited_sv = np.array(logits_sv)
        is_drawn_n = temperature_n >= GREEDY_TEMPERATURE
        if self._error is not None or not is_drawn_n.any():
            return edited_sv
        divisor_n1 = np.where(is_drawn_n, temperature_n, 1.0).astype(np.float32)[:, None]
        logits_nv = edited_sv[self._rows] / divisor_n1
        try:
            for processor in processors:
                logits_nv = _call(type(processor), _apply_one, processor, logits_nv)
        except VLLMValidationError as error:
            self._error = error
            return edited_sv
        edited_sv[self._rows[is_drawn_n]] = (logits_nv * divisor_n1)[is_drawn_n]
        return edited_sv


def _call_host(apply: Callable[[Any], np.ndarray], logits_sv: Array, _state: LogitsState) -> Array:
    return io_callback(apply, jax.ShapeDtypeStruct(logits_sv.shape, logits_sv.dtype), logits_sv)


def _apply_one(processor: LogitsProcessor, logits_nv: np.ndarray) -> np.ndarray:
    shape = logits_nv.shape
    result = np.asarray(processor.apply(logits_nv))
    if result.shape != shape or result.dtype.kind != "f":
        raise TypeError(f"apply must return floats {list(shape)}, as the logits it got, not {result.dtype} "
                        f"{list(result.shape)}")  # fmt: skip
    return result.astype(np.float32, copy=False)


def _call(owner: type, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call user code, which may raise anything."""
    try:
        return function(*arguments)
    except Exception as error:
        message = f"{PARAMETER}: {owner.__qualname__} failed: {type(error).__name__}: {str(error)[:500]}. {_WAY_OUT}."
        raise VLLMValidationError(message, parameter=PARAMETER, value=owner) from error


def _update(batch: list[_Request], requests: list[_Request]) -> BatchUpdate | None:
    """Make `batch` hold `requests`, in any order without holes; return the changes, or None if there are none."""
    wanted, present = set(requests), set(batch)
    gone = [row for row, request in enumerate(batch) if request not in wanted]
    added: list[AddedRequest] = []
    moved: list[MovedRequest] = []
    free = iter(gone)
    for request in requests:
        if request in present:
            continue
        row = next(free, len(batch))
        batch[row : row + 1] = [request]
        added.append((row, request.params, request.prompt_ids, request.output_ids))
    removed = list(free)
    for hole in removed:
        while batch and batch[-1] not in wanted:
            batch.pop()
        if hole < len(batch):
            moved.append((len(batch) - 1, hole, MoveDirectionality.UNIDIRECTIONAL))
            batch[hole] = batch.pop()
    if not (removed or added or moved):
        return None
    return BatchUpdate(len(batch), removed[::-1], added, moved)

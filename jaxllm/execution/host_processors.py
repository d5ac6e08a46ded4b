"""Run logits processors that are classes: the step calls the host, which runs them on numpy arrays.

The step stays one program, with one call for all processors that run before the penalties and one for those that run
after. Steps do not overlap, so that every output token is on the host before the next step needs it.

A request with drafts has a row of logits before each draft and one after the last. To the processors these are several
steps in turn, each with one row per request and with the drafts before it among the outputs. Once a draft proves wrong,
the request is removed and added again with the outputs that it really has, as a preempted one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from jaxllm.scheduling.plan import Chunk, StepPlan

_WAY_OUT = (
    "A class gets float32 numpy arrays on the host, and no torch; or write the same in jnp, as a function: "
    "`def process(logits_sv, state): return logits_sv` (docs/sampling.md)"
)


class _Request:
    """The part of a running request that processors see."""

    __slots__ = ("num_certain", "output_ids", "params", "prompt_ids")

    def __init__(self, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> None:
        self.params, self.prompt_ids, self.output_ids = params, prompt_ids, output_ids
        self.num_certain = len(output_ids)
        """The number of leading outputs that are no drafts."""

    def grown(self, chunk: Chunk) -> _Request:
        """Return the request with all outputs before a chunk's drafts; another one if a draft of it was wrong."""
        num_outputs = chunk.num_output_tokens - chunk.num_drafts
        end = len(chunk.token_ids) - chunk.num_drafts
        if (num_new := num_outputs - len(self.output_ids)) > 0:
            self.output_ids += chunk.token_ids[end - num_new : end].tolist()
        elif num_outputs > self.num_certain:
            output_ids = [*self.output_ids[: num_outputs - 1], chunk.token_ids[end - 1]]
            return _Request(self.params, self.prompt_ids, output_ids)
        self.num_certain = num_outputs
        return self


class _Turn(NamedTuple):
    """One row of logits of some requests, which to the processors is a step."""

    update: BatchUpdate | None
    requests: Sequence[_Request]
    """In the order of the processors' rows."""
    rows: np.ndarray
    """int64, each request's row of the step's logits."""
    drafts: Sequence[int]
    """The drafts before these rows, one per request; empty in the first turn."""


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
        """The requests of the last turn in the order of the processors' rows."""
        self._turns: list[_Turn] = []
        """The turns of the step; the processors know about the first one's rows before the step."""
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

    def before_step(self, plan: StepPlan) -> None:
        """Tell the processors about the next step's rows. Raises VLLMValidationError if one fails."""
        self._error = None
        firsts = {extra.row: extra.first for extra in plan.extra_rows}
        chunks = [(self._request_of(chunk), row, chunk) for row, chunk in enumerate(plan.chunks)]
        self._turns = []
        for turn in range(1 + max(chunk.num_drafts for _, _, chunk in chunks)):
            rows = {
                request: row if chunk.num_drafts == turn else firsts[row] + turn
                for request, row, chunk in chunks
                if chunk.num_drafts >= turn
            }
            drafts = {request: chunk.drafts[turn - 1] for request, _, chunk in chunks if chunk.num_drafts >= turn > 0}
            update = _update(self._batch, list(rows))
            numbers = np.array([rows[request] for request in self._batch], np.int64)
            in_rows = [drafts[request] for request in self._batch if turn]
            self._turns.append(_Turn(update, list(self._batch), numbers, in_rows))
        for processor in self._all:
            _call(type(processor), processor.update_state, self._turns[0].update)

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
            token_ids, num_prompt = chunk.history.tolist(), chunk.owner.num_prompt_tokens
            self._running[row] = _Request(chunk.params, token_ids[:num_prompt], token_ids[num_prompt:])
        self._running[row] = self._running[row].grown(chunk)
        return self._running[row]

    def _apply_first(self, logits_sv: Any) -> np.ndarray:
        return self._apply(self._first, logits_sv, divides=False)

    def _apply_last(self, logits_sv: Any) -> np.ndarray:
        return self._apply(self._last, logits_sv, divides=True)

    def _apply(self, processors: Sequence[LogitsProcessor], logits_sv: Any, *, divides: bool) -> np.ndarray:
        """Return the logits after the processors, which see each row divided by its temperature if `divides`.

        `after_step` raises an error that occurs.
        """
        edited_sv = np.array(logits_sv)
        try:
            for number, turn in enumerate(self._turns):
                if self._error is None:
                    self._begin(turn, processors if number else ())
                    temperature_n = np.array([each.params.temperature if divides else 1.0 for each in turn.requests])
                    _edit(processors, edited_sv, turn.rows, temperature_n)
        except VLLMValidationError as error:
            self._error = error
        return edited_sv

    def _begin(self, turn: _Turn, processors: Sequence[LogitsProcessor]) -> None:
        """Add a turn's drafts to the outputs, and tell the processors about its rows."""
        if turn.drafts:
            for request, draft in zip(turn.requests, turn.drafts, strict=True):
                request.output_ids.append(draft)
        else:
            for request in turn.requests:  # it may have drafts that other processors have seen
                del request.output_ids[request.num_certain :]
        for processor in processors:
            _call(type(processor), processor.update_state, turn.update)


def _call_host(apply: Callable[[Any], np.ndarray], logits_sv: Array, _state: LogitsState) -> Array:
    return io_callback(apply, jax.ShapeDtypeStruct(logits_sv.shape, logits_sv.dtype), logits_sv)


def _edit(
    processors: Sequence[LogitsProcessor], edited_sv: np.ndarray, rows: np.ndarray, temperature_n: np.ndarray
) -> None:
    """Let the processors edit some rows of the logits in place, each divided by its temperature, unless all are greedy.

    Rows of greedy requests are neither divided nor edited.
    """
    is_drawn_n = temperature_n >= GREEDY_TEMPERATURE
    if not is_drawn_n.any():
        return
    divisor_n1 = np.where(is_drawn_n, temperature_n, 1.0).astype(np.float32)[:, None]
    logits_nv = edited_sv[rows] / divisor_n1
    for processor in processors:
        logits_nv = _call(type(processor), _apply_one, processor, logits_nv)
    edited_sv[rows[is_drawn_n]] = (logits_nv * divisor_n1)[is_drawn_n]


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

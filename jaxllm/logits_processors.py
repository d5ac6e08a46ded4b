"""vLLM's interface of logits processor classes: they run on the host, on numpy arrays, one object per engine.

`LLM(logits_processors=[MyProcessor])` takes the class or its name, "module:MyProcessor". A processor that can be
written in jnp is faster as a function, which becomes part of the step (`docs/sampling.md`).
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

type AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""A new request: its row, params, prompt token ids, and output token ids, a list that grows with the output."""
type RemovedRequest = int
"""The former row of a removed request."""
type MovedRequest = tuple[int, int, MoveDirectionality]
"""A request's row before, its row after, and whether the two rows are swapped."""
type RequestLogitsProcessor = Callable[..., np.ndarray]
"""A function (output ids, logits [v]) -> logits, or (prompt ids, output ids, logits [v]) -> logits."""


class MoveDirectionality(enum.Enum):
    """What a move does to the request in its target row."""

    UNIDIRECTIONAL = enum.auto()
    """The request in that row is gone."""
    SWAP = enum.auto()
    """The request in that row moves to the other one."""


@dataclass(frozen=True)
class BatchUpdate:
    """How the rows of a step differ from those of the step before: requests are removed, then added, then moved.

    A request may be added or moved to the row of a finished one; that row is then not listed as removed.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Edits the logits of all requests of a step."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for params that this processor does not support."""
        del sampling_params

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Start without requests. `vllm_config` is the engine's, before its KV cache has a size; `device` is "cpu" and
        `is_pin_memory` False, since logits are in the host's memory.
        """

    @abstractmethod
    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Return the edited logits [requests, v], float32; they may be edited in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the most likely token never changes. If so, greedy requests are skipped, and the logits of
        others come after penalties and temperature.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Process the changes before a step; None if no row has changed."""


def process_dict_updates[State](
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Update a dict from rows to states and return whether it changed; `new_state` returns None for no state."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(row, None)
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            req_entries[row] = state
    for source, target, direction in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return before != req_entries


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs one function per request, which subclasses return from `new_req_logits_processor`."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Start without requests."""
        del vllm_config, device, is_pin_memory
        self.req_info: dict[int, Callable[[np.ndarray], np.ndarray]] = {}
        """The functions of the requests with one, by row, with token ids bound."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function that edits a request's logits, or None if it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Process the changes before a step."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits after each request's function."""
        for row, process in self.req_info.items():
            logits[row] = process(logits[row])
        return logits

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[np.ndarray], np.ndarray] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        takes_prompt = len(inspect.signature(process).parameters) == 3
        return partial(process, prompt_ids, output_ids) if takes_prompt else partial(process, output_ids)

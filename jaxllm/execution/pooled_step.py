"""Run a pooling model's step on the device, and read its outputs on the host.

The step is one pure function from parameters, pool and packed inputs to outputs; it has no sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jaxllm.core_messages import Pooled, RequestError, TokenOutput
from jaxllm.execution.batch import first_rows
from jaxllm.execution.caches import Caches, Pools
from jaxllm.execution.packing import BatchShape, unpack
from jaxllm.models.model import Model
from jaxllm.pooling_params import PoolingParams
from jaxllm.scheduling.plan import Chunk, StepKind, StepPlan


class PoolShape(NamedTuple):
    """The shape that a pooling step's program is compiled for."""

    batch: BatchShape
    by_token: bool
    """True if each token gives an output, and not each sequence."""


def run_pooled_step(
    params: Any,
    pools: Pools,
    ints: Array,
    floats: Array,
    *,
    model: Model,
    shape: PoolShape,
    caches: Caches,
) -> tuple[Pools, Array]:
    """Run one step; return the KV pools, and float32 outputs [s, o] or, by token, [t, o]."""
    inputs = unpack(ints, floats, shape.batch)
    arguments = caches.arguments(inputs, decodes_only=False)
    hidden_td, pools, _ = model.forward(params, pools, inputs.tokens, **arguments, media=inputs.media_tokens)
    if shape.by_token:
        return pools, model.pool_tokens(params, hidden_td)
    return pools, model.pool(params, hidden_td, inputs.placements[0].batch(inputs.sequences))


class Activation(NamedTuple):
    """The last operation on an output: calibration, then an activation if the request wants it."""

    name: str = "none"
    """One of "normalize" (to length 1), "sigmoid", "softmax", "relu" and "none"."""
    mean: float = 0.0
    sigma: float = 1.0
    """An output x counts as (x - mean) / sigma."""
    token_outputs: Mapping[str, TokenOutput] = MappingProxyType({})
    """The columns and activations of tasks of tokens that have heads of their own, by task."""

    def __call__(self, rows_ro: np.ndarray, *, activates: bool) -> np.ndarray:
        """Calibrate float32 rows, one by one, and activate them if `activates`."""
        if self.mean or self.sigma != 1:
            rows_ro = (rows_ro - np.float32(self.mean)) / np.float32(self.sigma)
        match self.name if activates else "none":
            case "normalize":
                lengths_r1 = np.sqrt(np.sum(rows_ro * rows_ro, axis=1, keepdims=True))
                return rows_ro / np.maximum(lengths_r1, np.float32(1e-12))
            case "sigmoid":
                return np.float32(1) / (np.float32(1) + np.exp(-rows_ro))
            case "softmax":
                powers_ro = np.exp(rows_ro - rows_ro.max(axis=1, keepdims=True))
                return powers_ro / powers_ro.sum(axis=1, keepdims=True)
            case "relu":
                return np.maximum(rows_ro, np.float32(0))
            case _:
                return rows_ro


NO_ACTIVATION = Activation()


def read_pooled(
    plan: StepPlan, outputs: np.ndarray, activation: Activation, row_alignment: int
) -> list[Pooled | RequestError | None]:
    """Return the pooled output of each chunk of a plan, from the outputs of its step.

    An output that is not a finite number is an error of its request. A chunk without an output yet has None.
    """
    if plan.kind is StepKind.POOL:
        return _read_sequences(plan.chunks, outputs, activation)
    lengths = np.array([len(chunk.token_ids) for chunk in plan.chunks])
    starts = first_rows(lengths, row_alignment)
    return [
        _read_tokens(chunk, outputs[start : start + length], activation)
        for chunk, start, length in zip(plan.chunks, starts, lengths, strict=True)
    ]


def _read_sequences(
    chunks: Sequence[Chunk], outputs_so: np.ndarray, activation: Activation
) -> list[Pooled | RequestError | None]:
    results: list[Pooled | RequestError | None] = [None] * len(chunks)
    alike: dict[tuple[bool, int | None], list[int]] = {}
    for index, chunk in enumerate(chunks):
        if chunk.start + len(chunk.token_ids) == chunk.owner.num_prompt_tokens:
            alike.setdefault(_wish(chunk.owner.pooling), []).append(index)
    for wish, places in alike.items():
        rows_ro = _finish(outputs_so[places], *wish, activation)
        are_numbers = np.isfinite(rows_ro).all(axis=1)
        for index, row_o, is_number in zip(places, rows_ro, are_numbers.tolist(), strict=True):
            results[index] = Pooled(row_o.tobytes(), 1) if is_number else _NO_NUMBER
    return results


def _read_tokens(chunk: Chunk, outputs_to: np.ndarray, activation: Activation) -> Pooled | RequestError:
    params = chunk.owner.pooling
    assert params is not None
    part = activation.token_outputs.get(params.task or "")
    if part is not None:
        outputs_to, activation = outputs_to[:, part.start : part.start + part.size], Activation(part.activation)
    if params.returned_token_ids is not None:
        outputs_to = outputs_to[:, params.returned_token_ids]
    rows_to = _finish(outputs_to, *_wish(params), activation)
    if params.step_tag_id is not None:
        rows_to = rows_to[np.asarray(chunk.token_ids) == params.step_tag_id]
    if part is not None:
        rows_to = rows_to[_inner(chunk.token_ids, part)]
    if not np.isfinite(rows_to).all():
        return _NO_NUMBER
    return Pooled(rows_to.tobytes(), len(rows_to), is_flat=part is not None and part.size == 1)


def _inner(token_ids: Sequence[int], part: TokenOutput) -> slice:
    """Return the tokens of a whole prompt that have an output."""
    drops_first, drops_last = token_ids[0] == part.first_id, token_ids[-1] == part.last_id
    return slice(int(drops_first), len(token_ids) - int(drops_last))


def _wish(params: PoolingParams | None) -> tuple[bool, int | None]:
    assert params is not None
    if params.late_chunking_params is not None:  # means come first, over tokens that may be in several steps
        return False, None
    return bool(params.use_activation), params.dimensions


def _finish(rows_ro: np.ndarray, use_activation: bool, dimensions: int | None, activation: Activation) -> np.ndarray:
    with np.errstate(all="ignore"):  # overflows are found by the check for finite numbers
        return activation(rows_ro[:, :dimensions], activates=use_activation)


_NO_NUMBER = RequestError(
    "internal",
    "The model's output has values that are no finite numbers (NaN or infinity): its weights, or their dtype, are "
    "not what this prompt needs. Try dtype='float32', or another checkpoint.",
)

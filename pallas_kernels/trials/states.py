"""Ragged steps over a pool of poisoned states, for the ops of recurrent state, and the references' answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent_state import StateBatch, StateOp
from pallas_kernels.recurrent_state.batches import Chunk, live_rows, state_batch
from pallas_kernels.recurrent_state.causal_conv import ConvShape
from pallas_kernels.recurrent_state.causal_conv.reference import reference_causal_conv
from pallas_kernels.recurrent_state.gated_delta import GatedDeltaShape
from pallas_kernels.recurrent_state.gated_delta.reference import reference_gated_delta
from pallas_kernels.recurrent_state.selective_scan import SelectiveScanShape
from pallas_kernels.recurrent_state.selective_scan.reference import reference_selective_scan
from pallas_kernels.recurrent_state.state_space import StateSpaceShape
from pallas_kernels.recurrent_state.state_space.reference import reference_state_space

from .trial import Call, Outcome, Trial, allowed_error, bucket, describe, is_finite, largest_error

NUM_LAYERS, LAYER, NUM_SLOTS = 2, 1, 24
STATE_ERROR = 2**-10
"""The largest error of a number of a float32 state: tiles multiply float32 numbers in two halves."""

MIXED = [
    Chunk(1, 0, 0, 3),  # begins
    Chunk(1, 5, 7, 7),  # goes on in place
    Chunk(1, 9, 2, 4),  # goes on elsewhere, and the slot that it came from stays
    Chunk(1, 15, 9, 9, 1, 10),  # is saved
    Chunk(1, 1, 2, 12, 1, 13),
    Chunk(40, 0, 0, 1, 17, 5),  # begins, and is saved on the way
    Chunk(2, 0, 0, 6),
    Chunk(5, 64, 11, 11, 5, 14),  # is saved at its end
    Chunk(33, 100, 2, 16, 1, 17),
    Chunk(3, 12, 15, 15, 2, 18),
]
"""Several sequences read slot 2; slots from 19 on belong to none."""
DRAFTED = [
    *MIXED[:4],
    Chunk(3, 20, 6, 6, rows=(14, 15)),  # the state after each row is kept
    Chunk(70, 0, 0, 1, 17, 5),
    Chunk(2, 5, 2, 8, rows=(16,)),
    Chunk(6, 9, 12, 12, rows=(17, 18, 11, 19, 20)),
    Chunk(2, 0, 0, 13),
]
"""Chunks with drafts beside others."""
LONG = [
    Chunk(1, 5, 7, 7),
    Chunk(200, 0, 0, 1, 133, 5),  # is saved within a tile
    Chunk(64, 0, 0, 2),
    Chunk(65, 64, 11, 11, 65, 14),  # goes on, and is saved at its end
    Chunk(63, 100, 12, 16, 1, 17),
    Chunk(128, 3, 15, 15, 64, 18),  # is saved between tiles
    Chunk(2, 0, 0, 3),
]
"""Chunks of several tiles, for kernels that take many tokens at a time."""
STEPS: dict[str, Sequence[Chunk]] = {
    "decodes": [*MIXED[:5], *[Chunk(1, 3, 2, 0)] * 27],
    "mixed": MIXED,
    "long": LONG,
    "drafted": DRAFTED,
}


class Step(NamedTuple):
    """The arguments of one call."""

    inputs: tuple[np.ndarray, ...]
    pool: np.ndarray
    """States in the reference's layout; states that no sequence reads are NaN."""
    batch: StateBatch
    rows: np.ndarray
    """The rows that are not padding; inputs of other rows are NaN."""


class Kind(NamedTuple):
    """The facts about one of the ops that a step needs."""

    folder: str
    of_layer: tuple[int, ...]
    """The inputs without rows."""
    reference: Callable[..., tuple[np.ndarray, np.ndarray]]


_KINDS: dict[type, Kind] = {
    GatedDeltaShape: Kind("gated_delta", (), reference_gated_delta),
    StateSpaceShape: Kind("state_space", (2, 5), reference_state_space),
    SelectiveScanShape: Kind("selective_scan", (2, 5), reference_selective_scan),
    ConvShape: Kind("causal_conv", (1,), reference_causal_conv),
}


def make_inputs(shape: Any, rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, ...]:
    """Return the inputs of an op, by its shape, in the order of its arguments."""
    if isinstance(shape, ConvShape):
        x, weight = (rng.standard_normal((count, shape.num_channels)) for count in (num_rows, shape.kernel_size))
        return x.astype(shape.dtype), weight.astype(shape.dtype)
    if isinstance(shape, StateSpaceShape):
        heads = shape.num_heads
        x = rng.standard_normal((num_rows, heads, shape.head_dim))
        b, c = (rng.standard_normal((num_rows, shape.num_groups, shape.state_dim)) for _ in range(2))
        dt = rng.uniform(0, 1, (num_rows, heads)).astype(np.float32)
        a, d = -rng.uniform(0.1, 2, heads).astype(np.float32), rng.standard_normal(heads).astype(np.float32)
        x, b, c = (values.astype(shape.dtype) for values in (x, b, c))
        return x, dt, a, b, c, d
    if isinstance(shape, SelectiveScanShape):
        channels, numbers = shape.num_channels, shape.state_dim
        x, b, c = (rng.standard_normal((num_rows, size)).astype(shape.dtype) for size in (channels, numbers, numbers))
        dt = rng.uniform(0, 1, (num_rows, channels)).astype(np.float32)
        a = -rng.uniform(0.1, 2, (channels, numbers)).astype(np.float32)
        return x, dt, a, b, c, rng.standard_normal(channels).astype(np.float32)
    q, k = (rng.standard_normal((num_rows, shape.num_key_heads, shape.key_dim)) for _ in range(2))
    v = rng.standard_normal((num_rows, shape.num_value_heads, shape.value_dim))
    log_decay = -rng.exponential(0.3, (num_rows, shape.num_value_heads, shape.decay_dim)).astype(np.float32)
    beta = rng.uniform(0, 1, (num_rows, shape.num_value_heads)).astype(np.float32)
    return *(values.astype(shape.dtype) for values in (q, k, v)), log_decay, beta


def make(seed: int, shape: Any, chunks: Sequence[Chunk] = MIXED) -> Step:
    """Return a step for an op's shape."""
    dtype: Any = np.float32
    if isinstance(shape, ConvShape):
        state, dtype = (shape.kernel_size - 1, shape.num_channels), shape.dtype
    elif isinstance(shape, SelectiveScanShape):
        state = shape.state
    elif isinstance(shape, StateSpaceShape):
        state = shape.num_heads, shape.head_dim, shape.state_dim
    else:
        state = shape.num_value_heads, shape.key_dim, shape.value_dim
    of_layer = _KINDS[type(shape)].of_layer
    return make_step(seed, chunks, partial(make_inputs, shape), state, dtype, of_layer=of_layer)


def make_step(
    seed: int,
    chunks: Sequence[Chunk],
    make: Callable[[np.random.Generator, int], tuple[np.ndarray, ...]],
    state: tuple[int, ...],
    dtype: Any = np.float32,
    *,
    of_layer: Collection[int] = (),
) -> Step:
    """Return a step with padding between its chunks and behind them, and states of a shape and dtype.

    `make` returns an op's inputs of a number of rows; the inputs `of_layer` have no rows.
    """
    rng = np.random.default_rng(seed)
    batch, num_rows = state_batch(chunks, gap=2, padding=3)
    rows = live_rows(batch)
    inputs = make(rng, num_rows)
    is_padding = np.delete(np.arange(num_rows), rows)
    for index, values in enumerate(inputs):
        if index not in of_layer:
            values[is_padding] = np.nan
    pool = np.full((NUM_LAYERS * NUM_SLOTS, *state), np.nan, np.float32)
    for slot in {chunk.read for chunk in chunks if chunk.read}:
        pool[LAYER * NUM_SLOTS + slot] = rng.standard_normal(state)
    return Step(inputs, pool.astype(dtype), batch, rows)


def alone(step: Step) -> Step:
    """Return a step of decodes alone as the engine makes it when it knows that there are no chunks."""
    return step._replace(batch=step.batch.without_chunks())


def to_pool(op: StateOp, states: np.ndarray) -> np.ndarray:
    """Return states of the reference's layout in the layout of the op's pool."""
    spec = op.pool_spec(NUM_LAYERS, NUM_SLOTS)
    if isinstance(op.shape, ConvShape):
        flat, held = states.reshape(len(states), -1), spec.shape[1:]
        return np.pad(flat, ((0, 0), (0, math.prod(held) - flat.shape[1]))).reshape(-1, *held)
    if spec.ndim == states.ndim:
        return states
    states = states.swapaxes(2, 3) if isinstance(op.shape, StateSpaceShape) else states
    parts = states.reshape(*states.shape[:3], -1, spec.shape[-1])
    return np.ascontiguousarray(parts.swapaxes(2, 3))


def from_pool(op: StateOp, pool: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an op's pool in the reference's layout, which has this shape."""
    if isinstance(op.shape, ConvShape):
        return pool.reshape(len(pool), -1)[:, : math.prod(shape[1:])].reshape(shape)
    if pool.ndim == len(shape):
        return pool
    states = pool.swapaxes(2, 3).reshape(*pool.shape[:2], pool.shape[3], -1)
    return states.swapaxes(2, 3) if isinstance(op.shape, StateSpaceShape) else states


def state_trials(op: StateOp) -> Iterator[Trial]:
    """Yield the trials of an op."""
    folder = f"recurrent_state.{_KINDS[type(op.shape)].folder}"
    for name, chunks in STEPS.items():
        yield Trial(folder, op.implementation, describe(op.shape), name, partial(_make_call, op, chunks))


def _make_call(op: StateOp, chunks: Sequence[Chunk]) -> Call:
    step = make(len(chunks), op.shape, chunks)
    step = _in_buckets(step, _KINDS[type(op.shape)].of_layer)
    if all(chunk.size == 1 for chunk in chunks):
        step = alone(step)
    settings: dict[str, Any] = {}
    if isinstance(op.shape, ConvShape):
        bias = np.random.default_rng(9).standard_normal(op.shape.num_channels).astype(op.shape.dtype)
        settings = {"bias_c": bias, "activation": "silu"}

    def function(inputs: Any, pool: Any, batch: Any, layer: Any) -> Any:
        run: Any = op
        return run(*inputs, pool, batch, layer=layer, num_layers=NUM_LAYERS, **settings)

    def compare(result: Any) -> Outcome:
        places = {"pool": step.pool, "batch": step.batch, "layer": LAYER, "num_layers": NUM_LAYERS}
        exact, states = _KINDS[type(op.shape)].reference(*step.inputs, **places, **settings)
        out, pool = map(np.asarray, result)
        return _compare(out, from_pool(op, pool, states.shape), exact, states, step.rows, op.shape.dtype)

    arguments = jax.tree.map(jnp.asarray, (step.inputs, to_pool(op, step.pool), step.batch))
    return Call(function, (*arguments, jnp.int32(LAYER)), compare)


def _in_buckets(step: Step, of_layer: Collection[int]) -> Step:
    """Return a step with as much padding as an engine's, whose numbers of rows and of sequences are powers of two."""
    num_rows, batch = len(step.inputs[0]), step.batch
    num_seqs = len(batch.query_starts_s)
    more_rows, more_seqs = bucket(num_rows) - num_rows, bucket(num_seqs) - num_seqs
    inputs = tuple(
        x
        if index in of_layer
        else np.pad(x, [(0, more_rows), *[(0, 0)] * (x.ndim - 1)], constant_values=np.asarray(np.nan, x.dtype))
        for index, x in enumerate(step.inputs)
    )
    # Padding sequences begin and end at one row, and their slots are 0.
    fields = {
        name: np.pad(
            x,
            (0, more_rows if name.endswith("_t") else more_seqs),
            mode="edge" if name.startswith("query") else "constant",
        )
        for name, x in batch._asdict().items()
        if np.ndim(x) == 1
    }
    return step._replace(inputs=inputs, batch=batch._replace(**fields))


def _compare(
    out: np.ndarray, pool: np.ndarray, exact: np.ndarray, states: np.ndarray, rows: np.ndarray, dtype: Any
) -> Outcome:
    """Compare outputs and states; slots that are NaN in the reference's pool are nobody's."""
    size = len(pool) // NUM_LAYERS
    got, want = (np.delete(x, np.arange(NUM_LAYERS) * size, axis=0).astype(np.float32) for x in (pool, states))
    is_state = np.isfinite(want).all(axis=tuple(range(1, want.ndim)))
    state_error = largest_error(got[is_state], want[is_state])
    wrong = {
        f"a state's error is {state_error:.1e}, allowed {STATE_ERROR:.1e}": not state_error <= STATE_ERROR,
        "a slot was written that is nobody's": not np.isnan(got[~is_state]).all(),
        "padding is not finite": not is_finite(out),
    }
    missed = tuple(what for what, is_wrong in wrong.items() if is_wrong)
    return Outcome(largest_error(out[rows], exact[rows]), allowed_error(dtype), missed)

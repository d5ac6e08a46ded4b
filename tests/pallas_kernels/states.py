"""Ragged steps over a poisoned pool, for the ops of recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_state import StateBatch, StateOp
from pallas_kernels.recurrent_state.batches import Chunk, live_rows, state_batch

NUM_LAYERS, LAYER, NUM_SLOTS = 2, 1, 24

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


class Step(NamedTuple):
    """The arguments of one call."""

    inputs: tuple[np.ndarray, ...]
    pool: np.ndarray
    """States in the reference's layout; states that no sequence reads are NaN."""
    batch: StateBatch
    rows: np.ndarray
    """The rows that are not padding; inputs of other rows are NaN."""


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


class Elsewhere(StateOp):
    """Runs an op as plain XLA runs it on other platforms than a CPU."""

    def _run(self, *arguments: Any, **settings: Any) -> tuple[jax.Array, jax.Array]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", lambda *arguments, cpu, default: default(*arguments))
            return super()._run(*arguments, **settings)


type Run = Callable[[Step], tuple[np.ndarray, np.ndarray]]
"""Runs a step, and returns the outputs of its rows, and the pool."""


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


def run_op(
    op: Any, step: Step, to_pool: Callable[[Any], Any], from_pool: Callable[[Any], Any], **settings: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as a program with a pool; return numpy arrays, the pool in the reference's layout."""
    names = [name for name in ("num_layers", "activation") if name == "num_layers" or name in settings]
    # Calls of equal ops are one function, which is compiled once.
    jitted = jax.jit(op.__call__, static_argnames=names, donate_argnames="pool")
    inputs, batch = jax.tree.map(jnp.asarray, (step.inputs, step.batch))
    pool = jnp.array(to_pool(step.pool))
    out, pool = jitted(*inputs, pool, batch, layer=jnp.int32(LAYER), num_layers=NUM_LAYERS, **settings)
    return np.asarray(out), from_pool(np.asarray(pool))


def matrix_run(op: Any, step: Step, *, is_transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Run an op whose states are matrices; the reference may have them as values by keys."""
    spec = op.pool_spec(NUM_LAYERS, NUM_SLOTS)

    def to_pool(states: np.ndarray) -> np.ndarray:
        if spec.ndim == 4:
            return states
        states = states.swapaxes(2, 3) if is_transposed else states
        parts = states.reshape(*states.shape[:3], -1, spec.shape[-1])
        return np.ascontiguousarray(parts.swapaxes(2, 3))

    def from_pool(pool: np.ndarray) -> np.ndarray:
        if spec.ndim == 4:
            return pool
        states = pool.swapaxes(2, 3).reshape(*pool.shape[:2], pool.shape[3], -1)
        return states.swapaxes(2, 3) if is_transposed else states

    return run_op(op, step, to_pool, from_pool)


def assert_pools_equal(pool: np.ndarray, expected: np.ndarray, *, rtol: float, atol: float = 0.0) -> None:
    """Check that pools are equal except for null slots, where padding may go."""
    for got, want in zip(np.split(pool, NUM_LAYERS), np.split(expected, NUM_LAYERS), strict=True):
        np.testing.assert_allclose(got[1:].astype(np.float32), want[1:].astype(np.float32), rtol=rtol, atol=atol)


def assert_rows_are_independent(
    run: Run, make: Callable[[list[Chunk]], Step], *, of_layer: Collection[int] = ()
) -> None:
    """Check that rows have the same bits in any chunks, and beside any others. `of_layer` is as for `make_step`."""
    whole = make([Chunk(41, 0, 0, 1)])
    expected, filled = run(whole)
    start = int(whole.batch.query_starts_s[0])
    for ends in ((1, 2, 3, 41), (16, 17, 40, 41), tuple(range(1, 42))):
        pool, parts = whole.pool, []
        for first, last in pairwise([0, *ends]):
            size = last - first
            chunk_alone = Chunk(size, first, 1 if first else 0, 1)
            others = [Chunk(1, 0, 0, 20), Chunk(17, 0, 0, 21)] if len(ends) < 5 else []
            step = make(sorted([chunk_alone, *others], key=lambda chunk: chunk.size > 1))
            row = int(step.batch.query_starts_s[np.asarray(step.batch.write_slots_s).tolist().index(1)])
            inputs = tuple(
                ours
                if index in of_layer
                else np.concatenate([mates[:row], ours[start + first : start + last], mates[row + size :]])
                for index, (ours, mates) in enumerate(zip(whole.inputs, step.inputs, strict=True))
            )
            out, pool = run(step._replace(inputs=inputs, pool=pool))
            parts.append(out[row : row + size])
        wanted = expected[start : start + 41].astype(np.float32)
        np.testing.assert_array_equal(np.concatenate(parts).astype(np.float32), wanted)
        np.testing.assert_array_equal(pool[LAYER * NUM_SLOTS + 1], filled[LAYER * NUM_SLOTS + 1])


def assert_saves_change_nothing(run: Run, step: Step) -> None:
    """Check that rows and states have the same bits if nothing is saved."""
    out, pool = run(step)
    batch = step.batch._replace(save_slots_s=np.zeros_like(step.batch.save_slots_s))
    plain, plain_pool = run(step._replace(batch=batch))
    np.testing.assert_array_equal(plain.astype(np.float32), out.astype(np.float32))
    first = LAYER * NUM_SLOTS
    for slot in step.batch.write_slots_s[step.batch.write_slots_s > 0]:
        np.testing.assert_array_equal(plain_pool[first + slot], pool[first + slot])
    for slot in step.batch.save_slots_s[step.batch.save_slots_s > 0]:
        assert np.isnan(plain_pool[first + slot].astype(np.float32)).all()
        assert not np.isnan(pool[first + slot].astype(np.float32)).any()


def scratch_bytes(
    op: Any, inputs: Sequence[Any], num_slots: int, *, of_layer: Collection[int] = ()
) -> tuple[int, int, int]:
    """Return the bytes of a pool, the bytes that a compiled step aliases, and the bytes of its scratch memory."""
    spec = op.pool_spec(NUM_LAYERS, num_slots)
    batch, num_rows = state_batch(MIXED)
    batch_spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.int32), batch)
    specs = [
        jax.ShapeDtypeStruct(x.shape if index in of_layer else (num_rows, *x.shape[1:]), x.dtype)
        for index, x in enumerate(inputs)
    ]

    def layers(inputs: Any, pool: Any, batch: Any) -> Any:
        """Run the op as a model does, in a loop over layers."""

        def body(layer: Any, carry: Any) -> Any:
            out, pool = carry
            read, pool = op(*inputs, pool, batch, layer=layer, num_layers=NUM_LAYERS)
            return out + read, pool

        outs = jax.eval_shape(lambda *x: op(*x, layer=0, num_layers=NUM_LAYERS), *inputs, pool, batch)
        return jax.lax.fori_loop(0, NUM_LAYERS, body, (jnp.zeros(outs[0].shape, outs[0].dtype), pool))

    memory: Any = jax.jit(layers, donate_argnums=1).lower(specs, spec, batch_spec).compile().memory_analysis()
    return spec.size * spec.dtype.itemsize, memory.alias_size_in_bytes, memory.temp_size_in_bytes

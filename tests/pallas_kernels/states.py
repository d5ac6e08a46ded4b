"""Ragged steps over a poisoned pool, for the ops of recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_state import StateOp
from pallas_kernels.recurrent_state.batches import Chunk, state_batch
from pallas_kernels.trials.states import (
    DRAFTED,
    LAYER,
    LONG,
    MIXED,
    NUM_LAYERS,
    NUM_SLOTS,
    Step,
    alone,
    from_pool,
    make,
    make_inputs,
    to_pool,
)

__all__ = [
    "DRAFTED",
    "LAYER",
    "LONG",
    "MIXED",
    "NUM_LAYERS",
    "NUM_SLOTS",
    "Elsewhere",
    "Run",
    "Step",
    "alone",
    "assert_pools_equal",
    "assert_rows_are_independent",
    "assert_saves_change_nothing",
    "make",
    "make_inputs",
    "run_op",
    "scratch_bytes",
]


class Elsewhere(StateOp):
    """Runs an op as plain XLA runs it on other platforms than a CPU."""

    def _run(self, *arguments: Any, **settings: Any) -> tuple[jax.Array, jax.Array]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", lambda *arguments, cpu, default: default(*arguments))
            return super()._run(*arguments, **settings)


type Run = Callable[[Step], tuple[np.ndarray, np.ndarray]]
"""Runs a step, and returns the outputs of its rows, and the pool."""


def run_op(op: Any, step: Step, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as a program with a pool; return numpy arrays, the pool in the reference's layout."""
    names = [name for name in ("num_layers", "activation") if name == "num_layers" or name in settings]
    # Calls of equal ops are one function, which is compiled once.
    jitted = jax.jit(op.__call__, static_argnames=names, donate_argnames="pool")
    inputs, batch = jax.tree.map(jnp.asarray, (step.inputs, step.batch))
    pool = jnp.array(to_pool(op, step.pool))
    out, pool = jitted(*inputs, pool, batch, layer=jnp.int32(LAYER), num_layers=NUM_LAYERS, **settings)
    return np.asarray(out), from_pool(op, np.asarray(pool), step.pool.shape)


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

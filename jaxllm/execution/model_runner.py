"""Owns parameters, KV pool and compiled programs, and runs plans on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.engine.messages import TokenLogprobs
from jaxllm.sampling.sampler import Logprobs
from jaxllm.scheduling.plan import Chunk, StepPlan, StepResult

from .batch import StepInputs, build
from .compiler import StepCompiler
from .kv_pool import make_pool
from .programs import Programs
from .step import StepOutput


class RunningStep:
    """A step on the device. `result` waits for it."""

    def __init__(self, plan: StepPlan, output: StepOutput) -> None:
        self.plan = plan
        self._output = output
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()

    def result(self) -> StepResult:
        """Wait for the tokens and return them as plain Python values."""
        num_rows = len(self.plan.chunks)
        token_ids = np.asarray(self._output.tokens_s)[:num_rows].tolist()
        if self._output.logprobs is None:
            return StepResult(token_ids=token_ids, logprobs=[None] * num_rows)
        return StepResult(token_ids, _to_host(self.plan.chunks, token_ids, self._output.logprobs))


class ModelRunner:
    """Runs steps in the order in which they are given; each waits for the one before on the device, not on the host."""

    def __init__(self, compiler: StepCompiler, params: Any, num_blocks: int, *, compile_ahead: bool) -> None:
        self.compiler, self.num_blocks = compiler, num_blocks
        self._params = params
        self._pool = make_pool(compiler.model, num_blocks, compiler.config.block_size)
        self._previous_tokens = jnp.zeros(compiler.max_rows, jnp.int32)
        # Neutral, and the same array each step: nothing is sent for what nobody uses.
        self._all_allowed = {
            bucket: jax.device_put(np.full(compiler.allowed_spec(bucket).shape, -1, np.int32))
            for bucket in compiler.buckets
        }
        compile_one = partial(compiler.compile, num_blocks=num_blocks)
        self.programs = Programs(compile_one, compiler.shapes(), ahead=compile_ahead)

    def run(self, plan: StepPlan) -> RunningStep:
        """Start a step and return at once, unless its program has yet to be compiled."""
        compiler = self.compiler
        shape = compiler.batch_shape(plan.num_tokens, len(plan.chunks))
        inputs = build(plan, shape, compiler.config.block_size, compiler.model.config.vocab_size)
        program = self.programs.get(compiler.step_shape(shape.bucket, is_full=inputs.is_full))
        self._pool, output = program(
            self._params, self._pool, self._previous_tokens, inputs.ints, inputs.floats, *self._allowed_bits(inputs)
        )
        self._previous_tokens = output.tokens_s
        return RunningStep(plan, output)

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        self.programs.wait()

    def shutdown(self) -> None:
        """Stop compiling ahead."""
        self.programs.stop()

    def _allowed_bits(self, inputs: StepInputs) -> list[Array | np.ndarray]:
        if not inputs.is_full:
            return []
        bits_sw = inputs.allowed_bits_sw
        return [self._all_allowed[inputs.shape.bucket] if bits_sw is None else bits_sw]


def _to_host(chunks: Sequence[Chunk], token_ids: list[int], logprobs: Logprobs) -> list[TokenLogprobs | None]:
    """Turn device arrays into one value per row that asked: one conversion an array, however many rows."""
    num_rows, num_columns = len(chunks), logprobs.top_sk.shape[1]
    asked = [chunk.params.logprobs if chunk.samples else None for chunk in chunks]
    counts = [num_columns if count == -1 else count for count in asked]
    # Python numbers are dear: no more columns than some row wants.
    most = max((count for count in counts if count is not None), default=0)
    sampled, ranks, top_ids, top = (np.asarray(x)[:num_rows] for x in logprobs)
    ids = np.column_stack((token_ids, top_ids[:, :most])).tolist()
    values = np.column_stack((sampled, top[:, :most])).tolist()
    return [
        None if count is None else TokenLogprobs(row_ids[: count + 1], row_values[: count + 1], rank)
        for count, row_ids, row_values, rank in zip(counts, ids, values, ranks.tolist(), strict=True)
    ]

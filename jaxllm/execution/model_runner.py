"""Owns parameters, KV pool and compiled programs, and runs plans on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.engine.messages import TokenLogprobs
from jaxllm.models.model import Model
from jaxllm.sampling.sampler import Logprobs
from jaxllm.scheduling.plan import Chunk, StepPlan, StepResult
from pallas_kernels.paged_attention import KVPool
from pallas_kernels.paged_attention.tiles import DEFAULT_TILES

from .batch import BatchShape, StepInputs, buffer_size, build, float_fields, int_fields
from .buckets import Bucket, make_buckets, pick_bucket
from .kv_pool import make_pool
from .programs import Programs
from .step import StepOutput, StepShape, run_step

# Without it XLA keeps bfloat16 intermediates in float32 where it likes, and a row's value depends on its bucket.
CPU_COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """The part of the engine's configuration that fixes shapes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_logprobs: int
    """-1 for the whole vocabulary."""
    compile_ahead: bool
    platform: str
    implementation: str | None = None
    """Of paged attention."""


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

    def __init__(self, config: RunnerConfig, model: Model, params: Any) -> None:
        self.config = config
        self._model, self._params = model, params
        self._num_logprobs = model.config.vocab_size
        if config.max_logprobs >= 0:
            self._num_logprobs = min(max(1, config.max_logprobs), model.config.vocab_size)
        self.buckets = make_buckets(config.max_num_batched_tokens, config.max_num_seqs)
        self._pool = make_pool(model.config, config.num_blocks, config.block_size, jnp.dtype(model.dtype).name)
        self._previous_tokens = jnp.zeros(self._max_rows, jnp.int32)
        # Neutral, and the same array each step: nothing is sent for what nobody uses.
        self._all_allowed = {
            bucket: jax.device_put(np.full(self._allowed_spec(bucket).shape, -1, np.int32)) for bucket in self.buckets
        }
        self.programs = Programs(self._compile, self.program_keys(), ahead=config.compile_ahead)

    def run(self, plan: StepPlan) -> RunningStep:
        """Start a step and return at once, unless its program has yet to be compiled."""
        bucket = pick_bucket(self.buckets, plan.num_tokens, len(plan.chunks))
        cfg = self.config
        inputs = build(plan, self._batch_shape(bucket), cfg.block_size, self._model.config.vocab_size)
        program = self.programs.get(self._step_shape(bucket, is_full=inputs.is_full))
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

    def lower(self, shape: StepShape, *, num_blocks: int | None = None) -> jax.stages.Lowered:
        """Lower one program, for a pool of `num_blocks` blocks if that is given."""
        spec = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        pool: KVPool = spec(self._pool)
        if num_blocks is not None:
            rows = num_blocks * self._model.config.num_layers
            pool = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), pool)
        allowed = [self._allowed_spec(shape.batch.bucket)] if shape.is_full else []
        step = partial(run_step, model=self._model, shape=shape, implementation=self.config.implementation)
        return jax.jit(step, donate_argnums=1).lower(
            spec(self._params),
            pool,
            jax.ShapeDtypeStruct((self._max_rows,), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(int_fields(shape.batch)),), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(float_fields(shape.batch)),), jnp.float32),
            *allowed,
        )

    def compile(self, shape: StepShape, *, num_blocks: int | None = None) -> jax.stages.Compiled:
        """Compile one program for this runner's device."""
        options = CPU_COMPILER_OPTIONS if self.config.platform == "cpu" else None
        return self.lower(shape, num_blocks=num_blocks).compile(compiler_options=options)

    def _compile(self, shape: StepShape) -> jax.stages.Compiled:
        return self.compile(shape)

    def program_keys(self) -> list[StepShape]:
        """Return what is compiled ahead, in order."""
        # A fresh engine's first steps are its largest, then come the decodes.
        order = [self.buckets[-1], *self.buckets[:-1]]
        return [self._step_shape(bucket, is_full=is_full) for is_full in (False, True) for bucket in order]

    def _step_shape(self, bucket: Bucket, *, is_full: bool) -> StepShape:
        return StepShape(self._batch_shape(bucket), is_full, self._num_logprobs if is_full else 0, self._max_rows)

    def _batch_shape(self, bucket: Bucket) -> BatchShape:
        max_blocks = -(-self.config.max_model_len // self.config.block_size)
        return BatchShape(bucket, max_blocks, DEFAULT_TILES.query)

    @property
    def _max_rows(self) -> int:
        return self.buckets[-1].num_seqs

    def _allowed_spec(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((bucket.num_seqs, -(-self._model.config.vocab_size // 32)), jnp.int32)

    def _allowed_bits(self, inputs: StepInputs) -> list[Array | np.ndarray]:
        if not inputs.is_full:
            return []
        bits_sw = inputs.allowed_bits_sw
        return [self._all_allowed[inputs.shape.bucket] if bits_sw is None else bits_sw]


def _to_host(chunks: Sequence[Chunk], token_ids: list[int], logprobs: Logprobs) -> list[TokenLogprobs | None]:
    """Turn device arrays into one value per row that asked: one conversion an array, however many rows."""
    num_rows = len(chunks)
    sampled, ranks, top_ids, top = (np.asarray(x)[:num_rows].tolist() for x in logprobs)
    results: list[TokenLogprobs | None] = []
    for row, chunk in enumerate(chunks):
        count = chunk.params.logprobs
        if count is None or not chunk.samples:
            results.append(None)
            continue
        count = len(top[row]) if count < 0 else count
        results.append(
            TokenLogprobs(
                token_ids=[token_ids[row], *top_ids[row][:count]],
                logprobs=[sampled[row], *top[row][:count]],
                rank=ranks[row],
            )
        )
    return results

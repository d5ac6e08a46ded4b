"""Which step programs there are, and how one is compiled: from shapes alone, without parameters or device memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.model import Model, unflatten
from pallas_kernels.paged_attention import kv_pool_spec
from pallas_kernels.paged_attention.tiles import DEFAULT_TILES

from .batch import BatchShape, buffer_size, float_fields, int_fields
from .buckets import Bucket, make_buckets, pick_bucket
from .step import StepShape, run_step

# Without it XLA keeps bfloat16 intermediates in float32 where it likes, and a row's value depends on its bucket.
CPU_COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """The part of the engine's configuration that fixes the shapes of steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    max_logprobs: int
    """At most the vocabulary."""
    platform: str
    implementation: str | None = None
    """Of paged attention; None picks."""


class StepCompiler:
    """Compiles the steps of one model under one configuration."""

    def __init__(self, config: StepConfig, model: Model) -> None:
        self.config, self.model = config, model
        self.buckets = make_buckets(config.max_num_batched_tokens, config.max_num_seqs)

    @property
    def max_rows(self) -> int:
        """Rows of a step's tokens, whatever its bucket."""
        return self.buckets[-1].num_seqs

    def shapes(self) -> list[StepShape]:
        """Return all programs, in the order in which a fresh engine will want them."""
        # Its first steps are its largest, then come the decodes.
        order = [self.buckets[-1], *self.buckets[:-1]]
        return [self.step_shape(bucket, is_full=is_full) for is_full in (False, True) for bucket in order]

    def batch_shape(self, num_tokens: int, num_seqs: int) -> BatchShape:
        """Return the smallest shape that holds a step."""
        return self._batch_shape(pick_bucket(self.buckets, num_tokens, num_seqs))

    def step_shape(self, bucket: Bucket, *, is_full: bool) -> StepShape:
        """Return the program of a bucket."""
        num_logprobs = max(1, self.config.max_logprobs) if is_full else 0
        return StepShape(self._batch_shape(bucket), is_full, num_logprobs, self.max_rows)

    def allowed_spec(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of the packed bits that say which ids each row may sample."""
        return jax.ShapeDtypeStruct((bucket.num_seqs, -(-self.model.config.vocab_size // 32)), jnp.int32)

    def lower(self, shape: StepShape, num_blocks: int) -> jax.stages.Lowered:
        """Lower a program for a pool of `num_blocks` blocks; the pool is donated."""
        cfg, model = self.config, self.model.config
        pool = kv_pool_spec(
            model.num_layers, num_blocks, cfg.block_size, model.num_kv_heads, model.head_dim, self.model.dtype
        )
        allowed = [self.allowed_spec(shape.batch.bucket)] if shape.is_full else []
        step = partial(run_step, model=self.model, shape=shape, implementation=cfg.implementation)
        return jax.jit(step, donate_argnums=1).lower(
            self._params_spec(),
            pool,
            jax.ShapeDtypeStruct((self.max_rows,), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(int_fields(shape.batch)),), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(float_fields(shape.batch)),), jnp.float32),
            *allowed,
        )

    def compile(self, shape: StepShape, num_blocks: int) -> jax.stages.Compiled:
        """Compile a program for a pool of `num_blocks` blocks."""
        options = CPU_COMPILER_OPTIONS if self.config.platform == "cpu" else None
        return self.lower(shape, num_blocks).compile(compiler_options=options)

    def scratch_bytes(self) -> int:
        """Return the scratch memory of the largest step; it does not depend on the number of blocks, so 2 will do."""
        largest = self.step_shape(self.buckets[-1], is_full=True)
        memory = self.compile(largest, 2).memory_analysis()
        if memory is None:
            raise RuntimeError(f"the compiler for {self.config.platform} does not say how much scratch memory it needs")
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def _batch_shape(self, bucket: Bucket) -> BatchShape:
        max_blocks = -(-self.config.max_model_len // self.config.block_size)
        return BatchShape(bucket, max_blocks, DEFAULT_TILES.query)

    def _params_spec(self) -> dict[str, Any]:
        specs = self.model.param_specs()
        return unflatten({path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in specs.items()})

"""Which step programs there are, and how one is compiled: from shapes alone, without parameters or device memory."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from jaxllm.models.model import Model, unflatten
from jaxllm.sampling.processors import LogitsProcessor, extra_args
from jaxllm.sampling.token_counts import set_row
from jaxllm.scheduling.plan import StepPlan
from pallas_kernels.paged_attention import KVPool, PagedAttention, copy_blocks

from .batch import BatchShape, buffer_size, count_rows, float_fields, int_fields
from .buckets import Bucket, make_buckets, pick_bucket
from .options import compiler_options
from .rows import RareInputs, rare_shapes
from .step import DeviceState, StepShape, run_step

# Rows of logits that exist at a time. Steps rarely fill their rows, and nothing is computed for tiles without any.
LOGITS_TILE = 64
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""As JAX names them."""
# Blocks that one run of the copy program moves; further ones take further runs.
COPIES = 8


class Upkeep(enum.Enum):
    """Small programs that run between steps."""

    COPY_BLOCKS = "copy blocks"
    """(pool, sources [COPIES], targets [COPIES]) -> pool"""
    SET_COUNTS = "set counts"
    """(token counts, row index, row [v]) -> token counts"""


type ProgramKey = StepShape | Upkeep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """The part of the engine's configuration that fixes the shapes of steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    attention: PagedAttention
    max_logprobs: int
    """At most the vocabulary."""
    platform: str
    logprobs_mode: str = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()
    batch_invariant: bool = False

    @property
    def block_size(self) -> int:
        return self.attention.shape.block_size


class StepCompiler:
    """Compiles the steps of one model under one configuration."""

    def __init__(self, config: StepConfig, model: Model) -> None:
        self.config, self.model = config, model
        alignment = config.attention.row_alignment
        self.buckets = make_buckets(config.max_num_batched_tokens, config.max_num_seqs, alignment)

    @property
    def max_rows(self) -> int:
        """Rows of a step's tokens, whatever its bucket."""
        return self.buckets[-1].num_seqs

    def programs(self) -> list[ProgramKey]:
        """Return all programs, in the order in which a fresh engine will want them."""
        return [*self._shapes(is_full=False), *Upkeep, *self._shapes(is_full=True)]

    def shapes(self) -> list[StepShape]:
        """Return the programs that are steps, in that order."""
        return self._shapes(is_full=False) + self._shapes(is_full=True)

    def _shapes(self, *, is_full: bool) -> list[StepShape]:
        # The first steps are the largest, then come the decodes.
        return [self.step_shape(bucket, is_full=is_full) for bucket in (self.buckets[-1], *self.buckets[:-1])]

    def batch_shape(self, plan: StepPlan) -> BatchShape:
        """Return the smallest shape that holds a step."""
        num_tokens = count_rows(plan, self.config.attention.row_alignment)
        return self._batch_shape(pick_bucket(self.buckets, num_tokens, plan.num_rows))

    def step_shape(self, bucket: Bucket, *, is_full: bool) -> StepShape:
        """Return the program of a bucket."""
        num_logprobs = max(1, self.config.max_logprobs) if is_full else 0
        return StepShape(self._batch_shape(bucket), is_full, num_logprobs, self.config.logprobs_mode, self.max_rows)

    def pool_spec(self, num_blocks: int) -> KVPool:
        """Return shape and dtype of the KV pool."""
        return self.config.attention.pool_spec(self.model.config.num_layers, num_blocks)

    def counts_spec(self) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of the token counts: a row for those that count nothing, and one per slot."""
        return jax.ShapeDtypeStruct((self.config.max_num_seqs + 1, self.model.config.vocab_size), jnp.uint16)

    def lower(self, key: ProgramKey, num_blocks: int, sharding: jax.sharding.Sharding | None = None) -> Lowered:
        """Lower a program for a pool of `num_blocks` blocks; pool and token counts are donated.

        With `sharding`, which all arguments get, for devices that need not be there.
        """
        lower = partial(_lower, platform=PLATFORMS[self.config.platform], sharding=sharding)
        pool, counts = self.pool_spec(num_blocks), self.counts_spec()
        if key is Upkeep.COPY_BLOCKS:
            ids = jax.ShapeDtypeStruct((COPIES,), jnp.int32)
            return lower(partial(copy_blocks, num_layers=self.model.config.num_layers), 0, pool, ids, ids)
        if key is Upkeep.SET_COUNTS:
            row = jax.ShapeDtypeStruct(counts.shape[1:], counts.dtype)
            return lower(set_row, 0, counts, jax.ShapeDtypeStruct((), jnp.int32), row)
        assert isinstance(key, StepShape)
        step = partial(
            run_step,
            model=self.model,
            shape=key,
            processors=self.config.processors,
            attention=self.config.attention,
            # On a GPU a loop would be driven from the host, and the step no longer be one CUDA graph.
            logits_tile=self.max_rows if self.config.platform == "gpu" else LOGITS_TILE,
        )
        return lower(
            step,
            1,
            self._params_spec(),
            DeviceState(pool, counts if key.is_full else None),
            jax.ShapeDtypeStruct((self.max_rows,), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(int_fields(key.batch)),), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(float_fields(key.batch)),), jnp.float32),
            self.rare_spec(key.batch.bucket) if key.is_full else None,
        )

    def rare_spec(self, bucket: Bucket) -> RareInputs:
        """Return shape and dtype of each rare input."""
        shapes = rare_shapes(bucket.num_seqs, self.model.config.vocab_size)
        return RareInputs(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in shapes))

    def compile(self, key: ProgramKey, num_blocks: int) -> jax.stages.Compiled:
        """Compile a program for a pool of `num_blocks` blocks."""
        config = self.config
        options = compiler_options(config.platform, self.model.dtype, config.batch_invariant)
        return self.lower(key, num_blocks).compile(compiler_options=options)

    def scratch_bytes(self) -> int:
        """Return the scratch memory of the largest step; it does not depend on the number of blocks, so 2 will do."""
        largest = self.step_shape(self.buckets[-1], is_full=True)
        memory = self.compile(largest, 2).memory_analysis()
        if memory is None:
            raise RuntimeError(f"the compiler for {self.config.platform} does not say how much scratch memory it needs")
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def _batch_shape(self, bucket: Bucket) -> BatchShape:
        max_blocks = -(-self.config.max_model_len // self.config.block_size)
        attention = self.config.attention
        arguments = tuple(extra_args(self.config.processors).items())
        return BatchShape(bucket, max_blocks, attention.tiles.query, attention.row_alignment, arguments)

    def _params_spec(self) -> dict[str, Any]:
        specs = self.model.param_specs()
        return unflatten({path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in specs.items()})


def _lower(
    function: Callable[..., Any], donated: int, *specs: Any, platform: str, sharding: jax.sharding.Sharding | None
) -> Lowered:
    jitted = jax.jit(function, donate_argnums=donated)
    if sharding is None:
        return jitted.lower(*specs)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), specs)
    return jitted.trace(*specs).lower(lowering_platforms=(platform,))

"""Compile the programs of an engine from shapes alone, without parameters or device memory."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered

from jaxllm.execution.caches import Caches, Pools
from jaxllm.execution.encoders.alignment import AlignInputs, AlignShape, run_alignment
from jaxllm.execution.encoders.clips import ClipShape, run_clip_encoder
from jaxllm.execution.encoders.patches import (
    WRITTEN_ROWS,
    EncoderShape,
    batch_spec,
    run_encoder,
    write_rows,
)
from jaxllm.execution.head_step import run_head_step
from jaxllm.execution.mesh import param_format, replicated
from jaxllm.execution.options import (
    compiler_options,
    compiling_for,
    tracing,
    widens_rounded_weights,
)
from jaxllm.execution.packing import (
    Bucket,
    buffer_sizes,
    rare_specs,
)
from jaxllm.execution.pooled_step import PoolShape, run_pooled_step
from jaxllm.execution.programs.shapes import ProgramKey, ProgramShapes, Upkeep, describe
from jaxllm.execution.step import DeviceState, StepOutput, StepShape, StepStatics, run_step
from jaxllm.execution.step_config import StepConfig
from jaxllm.execution.tiers.move_shape import MOVED_BLOCKS, MoveShape, move_program
from jaxllm.models.adapters import AdapterShape, lora_shapes, set_adapter
from jaxllm.models.model import Model
from jaxllm.models.params import ArraySpec, array_specs, stored, unflatten
from jaxllm.models.shapes import grouped_shapes, head_shapes, linear_shapes, segment_shapes
from jaxllm.sampling.inputs import RareRules
from jaxllm.sampling.logprobs import fill_logprobs
from jaxllm.sampling.token_counts import set_row
from jaxllm.utils.log import log_phase
from pallas_kernels import layer_norm, rms_norm
from pallas_kernels.weights import num_bytes

logger = logging.getLogger(__name__)

# The number of rows of logits that exist at a time. Steps rarely fill their rows, and empty tiles are not computed.
_LOGITS_TILE = 64
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""JAX's name for each of our platforms."""
# Blocks that one run of the copy program moves; further ones take further runs.
COPIES = 8


class _Signature(NamedTuple):
    """A program before it is traced."""

    function: Callable[..., Any]
    donated: tuple[int, ...]
    inputs: tuple[Any, ...]
    """The shape, dtype and sharding of each argument's arrays."""
    outputs: Any
    """The sharding of each array that the program returns."""


class StepCompiler:
    """The compiler of one model's steps under one configuration, for the devices of a mesh, which need not exist."""

    def __init__(self, config: StepConfig, model: Model, mesh: Mesh) -> None:
        self.config, self.model, self.mesh = config, model, mesh
        self.caches = Caches(config.kv_layout, mesh)
        self.shapes = ProgramShapes(config, model)
        self.options = compiler_options(
            config.platform,
            model.dtype,
            config.batch_invariant,
            quantized=widens_rounded_weights(model),
            devices=list(mesh.devices.flat),
        )
        self._tracing = threading.Lock()

    def counts_spec(self) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of the token counts: a row for requests that count nothing, and one per sequence."""
        return self._replicated((self.config.max_num_seqs + 1, self.model.config.vocab_size), jnp.uint16)

    def tokens_spec(self) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a step's tokens."""
        return self._replicated((self.shapes.max_rows,), jnp.int32)

    def rare_spec(self, bucket: Bucket) -> RareRules:
        """Return shape and dtype of each array that is sent on its own."""
        specs = rare_specs(bucket.num_seqs, self.model.config.vocab_size, self.config.max_drafts)
        return RareRules(*(self._replicated(spec.shape, spec.packed.dtype) for spec in specs))

    def lower(self, key: ProgramKey, num_blocks: int) -> Lowered:
        """Lower a program for a pool of `num_blocks` blocks; pool and token counts are donated."""
        function, donated, inputs, outputs = self._signature(key, num_blocks)
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=outputs)
        with tracing(), compiling_for(self.mesh.devices.flat[0]):
            return jitted.trace(*inputs).lower(lowering_platforms=(PLATFORMS[self.config.platform],))

    def trees(self, key: ProgramKey, num_blocks: int) -> tuple[Any, Any]:
        """Return the tree structures of a compiled program's arguments and results."""
        _, _, inputs, outputs = self._signature(key, num_blocks)
        return jax.tree.structure((inputs, {})), jax.tree.structure(outputs)

    def _signature(self, key: ProgramKey, num_blocks: int) -> _Signature:
        pools, counts = self.caches.specs(num_blocks), self.counts_spec()
        everywhere: Any = replicated(self.mesh)
        pool_shardings = jax.tree.map(lambda x: x.sharding, pools)
        if key is Upkeep.COPY_BLOCKS:
            ids = self._replicated((COPIES,), jnp.int32)
            pairs = ((ids, ids),) * len(self.config.groups)
            return _Signature(self.caches.copy, (0,), (pools, pairs), pool_shardings)
        if isinstance(key, MoveShape):
            ids = self._replicated((MOVED_BLOCKS,), jnp.int32)
            return _Signature(*move_program(self.caches, key, num_blocks, ids))
        if key is Upkeep.MAKE_STATE:
            make_state = partial(self._make_state, num_blocks)
            return _Signature(make_state, (), (), (pool_shardings, everywhere, everywhere if self._is_head else None))
        if key is Upkeep.MAKE_COUNTS:
            return _Signature(lambda: jnp.zeros(counts.shape, counts.dtype), (), (), everywhere)
        if key is Upkeep.SET_COUNTS:
            row, index = self._replicated(counts.shape[1:], counts.dtype), self._replicated((), jnp.int32)
            return _Signature(set_row, (0,), (counts, index, row), everywhere)
        if isinstance(key, EncoderShape) or key in (Upkeep.MAKE_MEDIA, Upkeep.WRITE_MEDIA):
            return self._media_signature(key)
        if isinstance(key, Upkeep):
            return self._adapters_signature(key)
        if isinstance(key, ClipShape):
            return _Signature(*self._clip_program(pools), pool_shardings)
        if isinstance(key, AlignShape):
            return self._align_signature(key)
        num_ints, num_floats = buffer_sizes(key.batch)
        buffers = self._replicated((num_ints,), jnp.int32), self._replicated((num_floats,), jnp.float32)
        if isinstance(key, PoolShape):
            inputs = (self.params_spec, pools, *buffers)
            return _Signature(self._pooled_step(key), (1,), inputs, (pool_shardings, everywhere))
        reads, logprobs = self.config.reads, fill_logprobs(everywhere, key.num_logprobs) if key.is_full else None
        inputs = (
            self.params_spec,
            DeviceState(pools, counts if key.is_full else None, self._hidden_spec()),
            self.tokens_spec(),
            *buffers,
            self.rare_spec(key.batch.bucket) if key.is_full else None,
            *([] if reads is None else [reads.whole_spec(num_blocks, self.mesh)]),
        )
        outputs = (
            DeviceState(pool_shardings, everywhere if key.is_full else None, everywhere if self._is_head else None),
            StepOutput(everywhere, logprobs, everywhere if self.model.returns_features else None),
        )
        return _Signature(self._step(key), (1,), inputs, outputs)

    def _media_signature(self, key: ProgramKey) -> _Signature:
        """Return the signature of a program that makes the feature cache or writes rows into it."""
        media, everywhere = self.media_spec(), replicated(self.mesh)
        if key is Upkeep.MAKE_MEDIA:
            return _Signature(lambda: jnp.zeros(media.shape, media.dtype), (), (), everywhere)
        if isinstance(key, EncoderShape):
            tower = self.model.towers[key.part]
            batch = jax.tree.map(lambda x: self._replicated(x.shape, x.dtype), batch_spec(tower, key))
            slots = self._replicated((batch.places_qk.shape[0],), jnp.int32)
            encode = partial(run_encoder, tower=tower, mesh=self.mesh)
            return _Signature(encode, (1,), (self.encoder_spec(key.part), media, batch, slots), everywhere)
        rows = self._replicated((WRITTEN_ROWS, media.shape[1]), jnp.float32)
        return _Signature(write_rows, (0,), (media, rows, self._replicated(rows.shape[:1], jnp.int32)), everywhere)

    def _clip_program(self, pools: Pools) -> tuple[Callable[..., Pools], tuple[int, ...], tuple[Any, ...]]:
        """Return the function that encodes a clip into the pools, the argument that it is given up, and all of them."""
        model, config = self.model, self.config
        block_ids = self._replicated((config.kv_layout.clip_blocks,), jnp.int32)
        tile = config.cross_groups[0].attention.tiles.query
        run = partial(run_clip_encoder, model=model, caches=self.caches, mesh=self.mesh, query_tile=tile)
        return run, (2,), (self.encoder_spec(), self.params_spec, pools, self._mels_spec(), block_ids)

    def _align_signature(self, key: AlignShape) -> _Signature:
        """Return the signature of a program that aligns transcripts."""
        model, everywhere = self.model, replicated(self.mesh)
        assert model.encoder is not None
        num_layers = sum(spec.is_cross for spec in model.plan.layers)
        inputs = AlignInputs(
            self._mels_spec(),
            self._replicated((key.num_tokens,), jnp.int32),
            self._replicated((3,), jnp.int32),
            self._replicated((num_layers, key.num_heads), jnp.int32),
        )
        run = partial(run_alignment, model=model, mesh=self.mesh)
        return _Signature(run, (), (self.encoder_spec(), self.params_spec, inputs), (everywhere, everywhere))

    def _mels_spec(self) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a clip's spectrogram."""
        assert self.model.encoder is not None
        shape = self.model.encoder.settings.num_mels, 2 * self.config.num_frames
        return self._replicated(shape, jnp.float32)

    def _adapters_signature(self, key: Upkeep) -> _Signature:
        adapters = self.adapters_spec()
        shardings = jax.tree.map(lambda x: x.sharding, adapters)
        if key is Upkeep.MAKE_ADAPTERS:
            return _Signature(partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), adapters), (), (), shardings)
        assert self.model.adapter_shape is not None
        one = self.adapters_spec(self.model.adapter_shape._replace(num_slots=1))
        return _Signature(set_adapter, (0,), (adapters, self._replicated((), jnp.int32), one), shardings)

    def _make_state(self, num_blocks: int) -> tuple[Pools, jax.Array, jax.Array | None]:
        specs = (self.tokens_spec(), self._hidden_spec())
        return self.caches.make(num_blocks), *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), specs)

    @property
    def _is_head(self) -> bool:
        return self.config.reads is not None

    def _hidden_spec(self) -> jax.ShapeDtypeStruct | None:
        """Return shape and dtype of the hidden states that a draft head keeps from step to step."""
        shape = self.shapes.max_rows, self.model.config.hidden_size
        return self._replicated(shape, self.model.dtype) if self._is_head else None

    def _step(self, shape: StepShape) -> Callable[..., tuple[DeviceState, StepOutput]]:
        if self.config.reads is not None:
            return partial(run_head_step, statics=self._statics, shape=shape, reads=self.config.reads)
        return partial(run_step, statics=self._statics, shape=shape)

    @cached_property
    def _statics(self) -> StepStatics:
        config, max_rows = self.config, self.shapes.max_rows
        return StepStatics(
            model=self.model,
            caches=self.caches,
            mesh=self.mesh,
            processors=config.processors,
            transcript_rules=config.transcript_rules,
            # On a GPU the host would drive a loop, and the step would no longer be one CUDA graph. Logits processors on
            # the host take all rows at once.
            logits_tile=max_rows if config.platform == "gpu" or config.host_processors else _LOGITS_TILE,
            # Elsewhere reading the head's weights takes all the time, and rows are cheap.
            few_rows=self.shapes.least_rows if config.platform == "cpu" and not config.host_processors else None,
            skips_unused=config.platform != "gpu",
        )

    def _pooled_step(self, shape: PoolShape) -> Callable[..., tuple[Pools, jax.Array]]:
        return partial(run_pooled_step, model=self.model, shape=shape, caches=self.caches)

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))

    def prepare(self, folder: Path | None = None) -> None:
        """Prepare this process to load a program that another process compiled.

        The machine code of the CPU's kernels is kept in `folder`.
        """
        self.caches.prepare(folder)
        model = self.model
        model.ops.grouped_matmul.prepare(grouped_shapes(model.specs), folder)
        model.ops.by_head.prepare(head_shapes(model.specs), folder)
        model.ops.linear.prepare(linear_shapes(model.specs), folder)
        for tower in model.encoders:
            tower.ops.linear.prepare(linear_shapes(tower.specs), folder)
            tower.attention.prepare(segment_shapes(tower.specs), folder)
        if model.adapter_shape is not None:
            model.ops.lora.prepare(lora_shapes(model.adapter_specs(), model.adapter_shape.num_slots), folder)
        if model.ops.has_cpu_norms:
            for norm in (rms_norm, layer_norm):
                norm.prepare(model.dtype, folder)

    def compile(self, key: ProgramKey, num_blocks: int) -> jax.stages.Compiled:
        """Compile a program for a pool of `num_blocks` blocks."""
        started = time.perf_counter()
        # Threads that trace at once take turns anyway, and the thread of the steps would wait for all of them.
        with nullcontext() if isinstance(key, Upkeep) else self._tracing:
            lowered = self.lower(key, num_blocks)
        compiled = lowered.compile(compiler_options=self.options)
        log_phase(logger, describe(key), time.perf_counter() - started)
        return compiled

    def used_bytes(self) -> int:
        """Return the bytes of one device that the largest step takes besides the pool.

        They hold parameters, inputs, token counts, scratch, and on a TPU the program's code. They hardly depend on the
        number of blocks, so it is compiled with 2.
        """
        memory = self._memory(self.shapes.largest_step)
        largest = {part: self._memory(shapes[-1]) for part, shapes in self.shapes.encoder_shapes.items()}
        clips = [self._memory(key) for key in self.shapes.clip_shapes]
        arguments = memory.argument_size_in_bytes - self.config.kv_layout.bytes(2)
        # The patches of an image come while the step before still runs.
        arguments += sum(each.argument_size_in_bytes - self._held_by(part) for part, each in largest.items())
        others = *largest.values(), *clips  # whose spectrograms are small
        scratch = max(each.temp_size_in_bytes + each.generated_code_size_in_bytes for each in (memory, *others))
        # With another number of blocks the compiler may order operations differently: its scratch stays within 1 %.
        return arguments + scratch + scratch // 50 + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def _held_by(self, part: str) -> int:
        """Return the bytes of a tower's parameters and of the feature cache, which the tower's programs take."""
        held = jax.tree.leaves((self.encoder_spec(part), self.media_spec()))
        return sum(num_bytes(math.prod(spec.shape), spec.dtype) for spec in held)

    def _memory(self, key: ProgramKey) -> Any:
        memory = self.compile(key, 2).memory_analysis()
        if memory is None:
            raise RuntimeError(f"the compiler for {self.config.platform} does not say how much memory it needs")
        return memory

    @cached_property
    def _param_specs(self) -> dict[str, Any]:
        """Return shape, dtype and sharding of all parameters."""
        arrays = array_specs(self.model.specs.all_param_specs())
        return unflatten({path: jax.tree.map(self._placed, stored(spec)) for path, spec in arrays.items()})

    def encoder_spec(self, part: str = "encoder") -> dict[str, Any]:
        """Return shape, dtype and sharding of the parameters of a tower or an encoder."""
        return self._param_specs[part]

    @cached_property
    def params_spec(self) -> dict[str, Any]:
        """Return the same of what a step reads: not the towers' parameters, but adapters, vectors and encoded media."""
        params = {name: spec for name, spec in self._param_specs.items() if name not in self.model.specs.encoders}
        adapters = {} if self.model.adapter_shape is None else {"adapters": self.adapters_spec()}
        vectors = self.config.vectors_shape
        steering = {} if vectors is None else {"steering": self._replicated(vectors, jnp.float32)}
        return params | adapters | steering | ({"media": self.media_spec()} if self.shapes.media_width else {})

    def media_spec(self) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of the feature cache."""
        return self._replicated((self.config.num_media_rows, self.shapes.media_width), self.model.dtype)

    def adapters_spec(self, shape: AdapterShape | None = None) -> Any:
        """Return shape, dtype and sharding of the adapters' arrays, for the model's slots or others."""
        return unflatten(jax.tree.map(self._placed, self.model.adapter_specs(shape)))

    def _placed(self, spec: ArraySpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=param_format(self.mesh, spec))

"""A configuration becomes a core that is ready for its first step: names checked, weights loaded, pool sized."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from jaxllm.config.environment import environment
from jaxllm.config.vllm_config import vllm_config
from jaxllm.constraints.token_masks import TokenMasks
from jaxllm.engine.core import EngineCore
from jaxllm.engine.kv_cache_size import make_model, measure_memory, memory_limit, size_pool, step_config
from jaxllm.execution.compiler import ProgramKey, StepCompiler
from jaxllm.execution.host_processors import HostProcessors
from jaxllm.execution.mesh import param_sharding
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.program_cache import ProgramCache, use_cache
from jaxllm.execution.programs import Programs
from jaxllm.loading.load import check_names, init_dummy, load_params
from jaxllm.models.config import ModelConfig
from jaxllm.models.model import ParamSpec, array_specs
from jaxllm.models.registry import is_built_in
from jaxllm.sampling.processors import on_host
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.scheduler import Scheduler
from jaxllm.utils.log import log_phase
from jaxllm.version import __version__

if TYPE_CHECKING:
    from jaxllm.config.engine_config import EngineConfig
    from jaxllm.constraints.compiler import GrammarCompiler
    from jaxllm.constraints.thinking import ThinkingTokens

logger = logging.getLogger(__name__)

XLA_VARIABLES = ("XLA_", "NPROC", "PJRT_")
"""Compiled programs depend on environment variables with these prefixes."""


@dataclass(frozen=True)
class Prepared:
    """The part of an engine that does not need the weights; its first program is being compiled, from shapes alone."""

    config: EngineConfig
    specs: Mapping[str, ParamSpec]
    compiler: StepCompiler
    programs: Programs[ProgramKey]
    num_blocks: int
    max_model_len: int
    started: float

    def stop(self) -> None:
        """Compile nothing further: there will be no engine."""
        self.programs.stop()


def prepare(config: EngineConfig) -> Prepared:
    """Check names, size the pool and begin to compile.

    Raises VLLMValidationError for a checkpoint that does not fit its architecture, or a KV cache that is too small.
    """
    started = time.monotonic()
    folders = use_cache(config.cache_dir, keeps_programs=keeps_programs(config))
    model = make_model(config)
    specs = model.param_specs(config.checkpoint.tensors)
    if config.load_format != "dummy":
        check_names(specs, config.checkpoint, ignored=model.ignored_tensors)
    host = _make_host_processors(config)
    memory = measure_memory(config, model, specs, memory_limit(config), host)
    num_blocks, max_model_len = size_pool(config, memory)
    compiler = StepCompiler(step_config(config, max_model_len, host), model, config.mesh)
    cache = ProgramCache(compiler, num_blocks, folders, environment(XLA_VARIABLES))
    programs = Programs(
        cache.compile,
        compiler.programs(),
        ahead=not config.enforce_eager,
        load=cache.load,
        is_kept=cache.is_kept,
        rare=[shape for shape in compiler.shapes() if shape.is_full],
    )
    return Prepared(config, specs, compiler, programs, num_blocks, max_model_len, started)


def _make_host_processors(config: EngineConfig) -> HostProcessors | None:
    """Make the logits processors that are classes. As in vLLM, they come before the KV cache has its size."""
    classes = on_host(config.logits_processors)
    if not classes:
        return None
    num_blocks = config.num_gpu_blocks_override or 0
    return HostProcessors(classes, vllm_config(config, num_blocks=num_blocks, max_model_len=config.max_model_len))


def make_core(
    prepared: Prepared, grammars: GrammarCompiler | None = None, thinking: ThinkingTokens | None = None
) -> EngineCore:
    """Load the weights and return the core. Log one line that says what runs where.

    Without `grammars` there are no structured outputs, without `thinking` no thinking budgets.
    """
    config, compiler, programs = prepared.config, prepared.compiler, prepared.programs
    num_blocks, max_model_len = prepared.num_blocks, prepared.max_model_len
    runner = ModelRunner(compiler, programs, num_blocks, partial(_load, config, prepared.specs))
    log_phase(logger, "weights, KV cache")
    masks = TokenMasks(config.model_config.vocab_size, grammars, thinking)
    scheduler_config = _scheduler_config(config, num_blocks, max_model_len, compiler.max_rows)
    scheduler = (config.scheduler_cls or Scheduler)(scheduler_config)
    device = config.mesh.devices[0]
    logger.info(
        "jaxllm %s: %s (%s) on %d %s (%s) in %s, attention %s, %d KV blocks of %d tokens, context %d, %d programs; "
        "loaded in %.1f s",
        __version__,
        config.model,
        config.model_config.architecture,
        config.mesh.size,
        device.platform,
        device.device_kind,
        f"{config.dtype}, weights {config.quantization}" if config.quantization else config.dtype,
        config.attention.implementation,
        num_blocks,
        config.block_size,
        max_model_len,
        len(compiler.programs()),
        time.monotonic() - prepared.started,
    )
    overlap = config.async_scheduling and compiler.config.host_processors is None
    return EngineCore(scheduler, runner, masks, max_model_len=max_model_len, overlap=overlap)


def keeps_programs(config: EngineConfig) -> bool:
    """Say whether programs can be kept by what they come from: no code from outside takes part in them, and they were
    seen to run from disk, as those of a CPU were.
    """
    is_ours = not config.logits_processors and is_built_in(config.model_config.architecture)
    return is_ours and config.platform == "cpu" and not config.attention.interpret


def _load(config: EngineConfig, specs: Mapping[str, ParamSpec]) -> Any:
    arrays = array_specs(specs)

    def sharding_for(path: str) -> jax.sharding.Sharding:
        return param_sharding(config.mesh, arrays[path])

    if config.load_format == "dummy":
        return init_dummy(specs, config.seed, sharding_for=sharding_for)
    config.checkpoint.fetch()
    return load_params(specs, config.checkpoint, sharding_for=sharding_for, progress=config.use_tqdm_on_load)


def _scheduler_config(config: EngineConfig, num_blocks: int, max_model_len: int, max_rows: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        row_alignment=config.attention.row_alignment,
        num_blocks=num_blocks,
        enable_prefix_caching=config.enable_prefix_caching and not _keys_depend_on_the_prompt(config.model_config),
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        max_rows=max_rows,
        keys_depend_on_prompt=_keys_depend_on_the_prompt(config.model_config),
        tracks_all_tokens=bool(config.logits_processors),
        kv_cache_metrics_sample=config.kv_cache_metrics_sample if config.kv_cache_metrics else None,
    )


def _keys_depend_on_the_prompt(model_config: ModelConfig) -> bool:
    """Say whether the same tokens have other keys in a longer prompt, as with dynamic RoPE: they cannot be shared."""
    return any(rope.rope_type == "dynamic" for rope in model_config.ropes)

"""Divide each device's memory into parameters, the largest step's scratch, and a KV cache in the rest.

The KV cache has KV blocks and recurrent states. Real devices and a topology's are treated alike, so that `jaxllm check`
reports what an engine will have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.host_processors import HostProcessors
from jaxllm.execution.kv_pool import KVLayout, PoolRequest, count_blocks, host_bytes, most_tokens
from jaxllm.execution.mesh import param_bytes
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.step_config import StepConfig
from jaxllm.models.model import Model
from jaxllm.models.params import ParamSpec
from jaxllm.pooling_params import TOKEN_TASKS
from jaxllm.resolve.encoder_decoders import transcript_rules
from jaxllm.resolve.hardware import real_memory_limit
from jaxllm.resolve.media_settings import media_size
from jaxllm.sampling.processors import traced

if TYPE_CHECKING:
    from jaxllm.resolve.engine_config import EngineConfig

LEAST_SEQS = 8
"""The least value that `max_num_seqs` is lowered to."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """An engine's size on its devices, or the reason why it does not fit."""

    config: EngineConfig
    """The settings, with `max_num_seqs` and `max_model_len` lowered to what fits, the draft model's too."""
    steps: StepConfig
    memory: _DeviceMemory | None
    """None if the largest step does not compile."""
    num_blocks: int
    """The number of KV blocks; 0 if the engine does not fit."""
    refusal: VLLMValidationError | RuntimeError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceMemory:
    """The use of one device's memory, in bytes; it is the same on all devices."""

    limit: int | None
    """The bytes that the engine may use; None for a CPU, whose pool has its own rule."""
    params: int
    scratch: int
    """The largest step's bytes besides parameters and pool: activations, logits, inputs, token counts, its code."""
    layout: KVLayout
    """The form of one device's KV cache."""

    @property
    def used(self) -> int:
        return self.params + self.scratch


def memory_limit(config: EngineConfig) -> int | None:
    """Return the bytes of one device that an engine may use, None on a CPU; VLLMValidationError if unknown."""
    if config.platform == "cpu":
        return None
    devices = config.mesh.devices.flat
    # Another host's device does not report its memory.
    device = next((each for each in devices if each.process_index == jax.process_index()), devices[0])
    reported = (device.memory_stats() or {}).get("bytes_limit")
    return real_memory_limit(device.device_kind, reported, config.args.gpu_memory_utilization)


def step_config(config: EngineConfig, host: HostProcessors | None = None) -> StepConfig:
    """Return the part of the configuration that fixes steps' shapes; `host` runs logits processors that are classes."""
    tasks = config.pooling.tasks if config.pooling else ()
    media = media_size(config)
    return StepConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        sizes=config.cudagraph_capture_sizes,
        draft_groups=config.draft.kv_groups if config.draft else (),
        features=config.draft.reads if config.draft else None,
        reads=config.reads,
        max_model_len=config.max_model_len,
        groups=config.kv_groups,
        cross_groups=config.cross_groups,
        num_frames=config.num_frames,
        alignment_heads=config.alignment_heads,
        states=config.state_groups,
        max_logprobs=config.max_logprobs,
        platform=config.platform,
        logprobs_mode=config.args.logprobs_mode,
        processors=(*traced(config.logits_processors), *(host.traced() if host else ())),
        transcript_rules=transcript_rules(config),
        host_processors=host,
        batch_invariant=config.batch_invariant,
        max_drafts=config.speculation.num_speculative_tokens if config.speculation else 0,
        num_media_rows=media.num_rows,
        num_video_frames=media.num_frames,
        vectors_shape=None if config.steering is None else config.steering.values_lvd.shape,
        keeps_evicted=config.args.kv_offloading_size is not None and config.draft is None,
        takes_embeds=config.args.enable_mm_embeds or config.args.enable_prompt_embeds,
        generates=config.generates,
        pools_sequences=any(task not in TOKEN_TASKS for task in tasks),
        pools_tokens=any(task in TOKEN_TASKS for task in tasks),
    )


def size_engine(
    config: EngineConfig,
    model: Model,
    specs: Mapping[str, ParamSpec],
    limit: int | None,
    *,
    draft: tuple[Model, Mapping[str, ParamSpec]] | None = None,
    make_host: Callable[[EngineConfig], HostProcessors | None] = lambda _: None,
    measure: Callable[[StepCompiler], int] = lambda compiler: compiler.used_bytes(),
) -> EngineSize:
    """Settle the number of sequences, of KV blocks and the context length, for `limit` bytes of each device.

    `draft` is the draft model with the specs of its parameters. `make_host` makes the logits processors that are
    classes, once the number of sequences is settled. `measure` returns the `used_bytes` of a compiler.
    """
    config = fit_num_seqs(config, specs, limit)
    steps, memory, num_blocks, refusal = step_config(config, make_host(config)), None, 0, None
    try:
        memory = _measure_memory(steps, config.mesh, model, specs, limit, measure)
        if config.draft is not None and draft is not None:
            draft_memory = _measure_memory(step_config(config.draft), config.mesh, *draft, limit, measure)
            memory = _beside_draft(memory, draft_memory)
        num_blocks, max_model_len = size_pool(config, memory)
        steps, config = replace(steps, max_model_len=max_model_len), _shortened(config, max_model_len)
    except (VLLMValidationError, JaxRuntimeError) as error:
        refusal = error
    return EngineSize(config=config, steps=steps, memory=memory, num_blocks=num_blocks, refusal=refusal)


def _shortened(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """Return settings with a context length; the draft model's is lowered to it."""
    draft = config.draft
    if draft is not None:
        draft = replace(draft, max_model_len=min(draft.max_model_len, max_model_len))
    return replace(config, max_model_len=max_model_len, draft=draft)


def fit_num_seqs(config: EngineConfig, specs: Mapping[str, ParamSpec], limit: int | None) -> EngineConfig:
    """Return settings with recurrent states in at most half of the KV cache's memory, if possible.

    Where nothing attends they may take three quarters of it, since the rest is for a step's scratch alone.

    `max_num_seqs` is halved for that, down to `LEAST_SEQS`, unless the user has set it; `size_pool` raises if states
    still do not fit. The memory is what parameters leave of `limit`, the bytes of a device that the engine may
    use, or `kv_cache_memory_bytes` if that is less; where there is no limit, on a CPU, it is half of the host's
    memory.
    """
    if not config.max_num_seqs_can_shrink or not config.state_groups:
        return config
    share = 0.5 if any(group.num_layers for group in config.kv_groups) else 0.75
    free = host_bytes() // 2 // config.mesh.size if limit is None else limit - param_bytes(config.mesh, specs)
    room = int(share * min(free, config.args.kv_cache_memory_bytes or free))
    layout = step_config(config).kv_layout
    while layout.max_num_seqs > LEAST_SEQS and layout.state_bytes > room:
        layout = replace(layout, max_num_seqs=max(LEAST_SEQS, layout.max_num_seqs // 2))
    if layout.max_num_seqs < config.max_num_seqs:
        logger.warning(
            "max_num_seqs lowered from %d to %d, whose recurrent states take %d MiB of each device; set it for more.",
            config.max_num_seqs,
            layout.max_num_seqs,
            layout.state_bytes >> 20,
        )
    return replace(config, max_num_seqs=layout.max_num_seqs)


def _measure_memory(
    steps: StepConfig,
    mesh: Mesh,
    model: Model,
    specs: Mapping[str, ParamSpec],
    limit: int | None,
    measure: Callable[[StepCompiler], int],
) -> _DeviceMemory:
    """Return the memory that the model takes; the largest step is compiled if its scratch matters."""
    params, scratch = param_bytes(mesh, specs), 0
    if limit is not None and params <= limit:
        compiler = StepCompiler(steps, model, mesh)
        # A draft head's program also takes the tables that belong to the model; none takes the towers' parameters.
        read = {path: spec for path, spec in specs.items() if not model.specs.is_of_encoder(path)}
        read |= dict(model.specs.lent)
        scratch = measure(compiler) - param_bytes(mesh, read)
    return _DeviceMemory(limit=limit, params=params, scratch=scratch, layout=steps.kv_layout)


def _beside_draft(memory: _DeviceMemory, draft: _DeviceMemory) -> _DeviceMemory:
    """Return the memory of a model together with its draft model; their steps alternate."""
    return replace(memory, params=memory.params + draft.params, scratch=max(memory.scratch, draft.scratch))


def size_pool(config: EngineConfig, memory: _DeviceMemory) -> tuple[int, int]:
    """Return the number of KV blocks and the context length, lowered to what they hold if the user left it open.

    Both depend on the configuration and one device's total memory alone, so every start gives the same. Raises
    VLLMValidationError if the parameters alone are too large, or the pool would not hold one request.
    """
    if memory.limit is not None and memory.params > memory.limit:
        hint = " or set quantization='int8'" if config.quantization is None else ""
        raise VLLMValidationError(
            f"The parameters alone take {memory.params / 2**30:.1f} GiB of each device, and the engine may use "
            f"{memory.limit / 2**30:.1f} GiB: raise tensor_parallel_size{hint}.",
            parameter="tensor_parallel_size",
            value=config.mesh.size,
        )
    request = _pool_request(config, memory)
    if config.max_model_len_can_shrink:
        fits = most_tokens(request, used_bytes=memory.used)
        if 0 < fits < config.max_model_len:
            logger.warning(
                "max_model_len lowered from %d to %d, which is what the KV cache holds; give it more memory for more.",
                config.max_model_len,
                fits,
            )
            request = replace(request, layout=replace(request.layout, max_model_len=fits))
    return count_blocks(request, used_bytes=memory.used), request.max_model_len


def longest_context(config: EngineConfig, memory: _DeviceMemory) -> int:
    """Return the length of the longest request that the pool can hold."""
    return most_tokens(_pool_request(config, memory), used_bytes=memory.used)


def _pool_request(config: EngineConfig, memory: _DeviceMemory) -> PoolRequest:
    return PoolRequest(
        layout=memory.layout,
        num_devices=config.mesh.size,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        kv_cache_memory_bytes=config.args.kv_cache_memory_bytes,
        memory_limit=memory.limit,
    )

"""Resolve `EngineArgs` to the `EngineConfig` of an engine, by its checkpoint and devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxllm.config.arguments import EngineArguments
from jaxllm.config.environment import default_cache_dir, limit_cpu, reserve_gpu_memory
from jaxllm.config.groups import OTHER_GRAMMARS, StructuredOutputsConfig
from jaxllm.config.plugins import load_plugins
from jaxllm.config.speculative import HEADS
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve import checkpoint_settings as settings
from jaxllm.resolve.encoder_decoders import check_encoder_decoder
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.head_settings import with_token_ids
from jaxllm.resolve.limits import check_attention_chunks, check_offloading, resolve_limits, resolve_max_model_len
from jaxllm.resolve.media_settings import find_senses, takes_images
from jaxllm.resolve.prompt_embeds import check_prompt_embeds
from jaxllm.resolve.resolve_pooling import Resolved, is_causal, resolve_pooling
from jaxllm.resolve.resolve_speculation import (
    draft_arguments,
    refuse_head,
    refused_draft,
    resolve_speculation,
    with_draft,
)
from jaxllm.usage.usage_lib import UsageContext

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllm.execution.mesh import Device
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.models.config import ModelConfig
    from jaxllm.resolve.resolve_ops import Picker
    from jaxllm.sampling.processors import LogitsProcessor

_PLATFORMS = ("cpu", "gpu", "tpu")

logger = logging.getLogger(__name__)

type _Devices = Sequence[Device] | None
type _Opened = Checkpoint | None
type _Reasons = Mapping[str, str]


def resolve(
    args: EngineArguments,
    devices: Sequence[Device] | None = None,
    checkpoint: Checkpoint | None = None,
    disproved: _Reasons = MappingProxyType({}),
    *,
    usage_context: UsageContext = UsageContext.LLM_CLASS,
) -> EngineConfig:
    """Load the plugins, open the checkpoint (headers and config only) and settle everything.

    `devices` replace the devices that JAX sees; they may be a topology's. `checkpoint` is one that is open already.
    `disproved` has the ops whose kernels are wrong here, as `selfcheck` returns them. `usage_context` is what the
    engine is for. The order of checks: argument values, checkpoint, architecture, length, devices, then settings that
    depend on them.
    """
    load_plugins()
    config = _settle(args, devices, checkpoint, disproved, usage_context, is_draft=False)
    refuse_head(config)
    check_prompt_embeds(config)
    config = _with_hidden_layers(_with_vectors(config))
    draft_args = draft_arguments(config)
    check_offloading(args, caches_prefixes=config.enable_prefix_caching, has_draft=draft_args is not None)
    return config if draft_args is None else with_draft(config, _settle_draft(config, draft_args, disproved))


def _settle(
    args: EngineArguments, devices: _Devices, opened: _Opened, disproved: _Reasons, use: UsageContext, *, is_draft: bool
) -> EngineConfig:
    """Settle everything but the draft model."""
    from jaxllm.loading.dtype import resolve_dtype
    from jaxllm.resolve.resolve_ops import Picker

    args = dataclasses.replace(args)  # checks them again; the user may still change the other object
    scheduler_cls = settings.load_class("scheduler_cls", args.scheduler_cls)
    logits_processors = _load_processors(args.logits_processors)
    chat_template = settings.read_chat_template(args.chat_template)
    checkpoint = opened or _open(args)
    hf_config = settings.apply_overrides(checkpoint.config, args.hf_overrides)
    resolved = _resolve_model(args, checkpoint, hf_config)
    generation_config = settings.read_generation_config(args.generation_config, checkpoint)
    generation = args.generation_config, generation_config, args.override_generation_config
    max_model_len, can_shrink = resolve_max_model_len(args, resolved)
    mesh, platform, model_config = _resolve_devices(args, devices, resolved.model_config.within(max_model_len))
    _check_processors(logits_processors, model_config.vocab_size, mesh.size)
    limits = resolve_limits(args, platform, mesh.devices.flat[0], max_model_len, resolved, is_online=use.is_online)
    dtype, picker = resolve_dtype(args.dtype, checkpoint, platform), Picker(mesh, platform, disproved)
    check_attention_chunks(model_config, limits)
    ops = _resolve_ops(args, checkpoint, model_config, dtype, limits["block_size"], picker, is_draft=is_draft)
    return EngineConfig(
        **limits,
        **ops,
        args=args,
        usage_context=use,
        checkpoint=checkpoint,
        hf_config=hf_config,
        runner_type=resolved.runner_type,
        convert_type=resolved.convert_type,
        pooler_config=resolved.pooler_config,
        pooling=resolved.pooling,
        mesh=mesh,
        platform=platform,
        max_model_len=max_model_len,
        max_model_len_can_shrink=can_shrink,
        max_logprobs=_resolve_max_logprobs(args.max_logprobs, model_config.vocab_size),
        logits_processors=logits_processors,
        structured_outputs_config=_resolve_structured_outputs(args.structured_outputs_config),
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        scheduler_cls=scheduler_cls,
        speculation=resolve_speculation(args, resolved, platform),
        max_cpu_loras=args.max_cpu_loras or args.max_loras,
        generation_config=generation_config,
        default_sampling_params=settings.default_sampling_params(*generation),
        max_output_tokens=settings.max_output_tokens(*generation),
        chat_template=chat_template,
        cache_dir=default_cache_dir(),
    )


def _with_vectors(config: EngineConfig) -> EngineConfig:
    """Return the settled engine with its steering vectors. Raises VLLMValidationError if it cannot have them."""
    path, architecture = config.args.steering, config.model_config.architecture
    if path is None:
        return config
    from jaxllm.steering.vectors import read_vectors

    if config.runner_type != "generate" or config.model_config.encoder is not None:
        message = f"steering is for decoders that generate, which {architecture} does not do here. Leave it out."
        raise VLLMValidationError(message, parameter="steering", value=path)
    if any("steering" in getattr(each, "extra_args", {}) for each in config.logits_processors):
        message = "steering: a logits processor takes an argument of this name. Give that another name."
        raise VLLMValidationError(message, parameter="steering", value=path)
    vectors = read_vectors(path, len(config.model_config.layers), config.model_config.hidden_size)
    return dataclasses.replace(config, steering=vectors)


def _with_hidden_layers(config: EngineConfig) -> EngineConfig:
    """Return the settled engine with the layers that requests may have returned. Raises VLLMValidationError."""
    name, layers, speculative = "hidden_states_layers", config.args.hidden_states_layers, config.args.speculation()
    num_layers, reason = len(config.model_config.layers), None
    if layers is None:
        return config
    if config.runner_type != "generate" or config.model_config.encoder is not None:
        reason = f"is for decoders that generate, which {config.model_config.architecture} does not do here"
    elif speculative is not None and speculative.drafter in HEADS:
        reason = "does not go with a draft head, which reads hidden states itself: use another method of guessing"
    elif any(not -num_layers <= layer < num_layers for layer in layers):
        reason = f"must have layers from {-num_layers} to {num_layers - 1}"
    counted = tuple(layer % num_layers for layer in layers)
    if reason is None and len(set(counted)) < len(counted):
        reason = "names a layer twice"
    if reason is not None:
        raise VLLMValidationError(f"{name}={layers} {reason}.", parameter=name, value=layers)
    return dataclasses.replace(config, hidden_layers=counted)


def _settle_draft(config: EngineConfig, args: EngineArguments, disproved: _Reasons) -> EngineConfig:
    from jaxllm.loading.open import open_config

    try:
        is_same = (args.model, args.revision) == (config.args.model, config.args.revision)
        checkpoint = config.checkpoint if is_same else None
        if checkpoint is None and not config.checkpoint.tensors:  # the weights of both are ignored
            where = {"revision": args.revision, "token": args.hf_token, "download_dir": args.download_dir}
            checkpoint, args = open_config(args.model, **where), dataclasses.replace(args, load_format="dummy")
        devices = list(config.mesh.devices.flat)
        return _settle(args, devices, checkpoint, disproved, config.usage_context, is_draft=True)
    except VLLMValidationError as error:
        raise refused_draft(args.model, error) from error


def _open(args: EngineArguments) -> Checkpoint:
    """Open the checkpoint; an unsupported architecture is refused before its weights are read."""
    from jaxllm.loading.open import open_checkpoint

    return open_checkpoint(
        args.model,
        load_format=args.load_format,
        revision=args.revision,
        token=args.hf_token,
        download_dir=args.download_dir,
        check_config=lambda config: settings.find_family(
            args.model, settings.apply_overrides(config, args.hf_overrides)
        ),
        sees=takes_images(args),
    )


def _resolve_model(args: EngineArguments, checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> Resolved:
    """Settle the model and its tasks."""
    hf_config = with_token_ids(hf_config, checkpoint)
    senses = find_senses(args, checkpoint, hf_config)
    model_config = settings.read_model_config(args.model, checkpoint, hf_config, **senses._asdict())
    resolved = resolve_pooling(args, checkpoint, hf_config, model_config)
    check_encoder_decoder(args, resolved)
    if args.kv_cache_dtype != "auto" and not is_causal(resolved.model_config):
        message = f"kv_cache_dtype={args.kv_cache_dtype!r} is for models that keep keys and values from step to step, "
        message += f"and {resolved.model_config.architecture} does not. Leave it out."
        raise VLLMValidationError(message, parameter="kv_cache_dtype", value=args.kv_cache_dtype)
    return resolved


def detect_platform(devices: Sequence[Device]) -> str:
    """Return the platform of devices: "cpu", "gpu" or "tpu"."""
    backend = devices[0].platform
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(backend, backend)
    if platform not in _PLATFORMS:
        raise VLLMValidationError(
            f"jaxllm runs on cpu, gpu and tpu, but JAX's devices are of {backend!r}; set JAX_PLATFORMS.",
            parameter="platform",
            value=backend,
        )
    return platform


def _resolve_devices(
    args: EngineArguments, devices: Sequence[Device] | None, model_config: ModelConfig
) -> tuple[Mesh, str, ModelConfig]:
    """Settle the devices of the model, their platform, and the model that is spread over them."""
    from jaxllm.execution.mesh import EXPERT_AXIS, deal_experts, resolve_mesh, spread

    limit_cpu()
    if devices is None:
        is_sized = args.kv_cache_memory_bytes is None and args.num_gpu_blocks_override is None
        reserve_gpu_memory(args.gpu_memory_utilization if is_sized else 1.0)
    mesh = resolve_mesh(args.tensor_parallel_size, args.mesh, devices)
    if args.enable_expert_parallel:
        mesh = deal_experts(mesh, model_config)
    platform = detect_platform(list(mesh.devices.flat))
    return mesh, platform, spread(model_config, mesh.size, mesh.shape[EXPERT_AXIS])


def _resolve_ops(
    args: EngineArguments,
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    dtype: str,
    block_size: int,
    picker: Picker,
    *,
    is_draft: bool,
) -> dict[str, Any]:
    """Settle the ops, the form of weights, and whether outputs may depend on the batch."""
    import jax

    from jaxllm.execution.options import library_is_invariant
    from jaxllm.models import LayerLoop
    from jaxllm.resolve.resolve_ops import choose_ops

    ops = choose_ops(args, checkpoint, model_config, dtype, block_size, picker, is_draft=is_draft)
    attention = [group.attention for group in (*ops.kv_groups, *ops.cross_groups)]
    stateful = [*attention, *(group.ops for group in ops.state_groups)]
    invariant = settings.resolve_batch_invariant(
        args.batch_invariant,
        picker.platform,
        dtype,
        jax.__version_info__,
        is_free=ops.specs.loop is LayerLoop.IN_PLACE or library_is_invariant(dtype),
        is_assured=all(op.is_invariant for op in stateful),
    )
    return {
        "model_config": model_config,
        "dtype": dtype,
        "quantization": ops.specs.quantization,
        "ops": ops,
        "batch_invariant": invariant,
    }


def _load_processors(processors: list[Any] | None) -> tuple[LogitsProcessor | type, ...]:
    if not processors:
        return ()  # JAX need not be imported yet
    from jaxllm.sampling.processors import load_processors

    return load_processors(processors)


def _check_processors(processors: Sequence[LogitsProcessor | type], vocab_size: int, num_devices: int) -> None:
    """Check that functions can be traced; refuse classes where the logits come from several devices."""
    if not processors:
        return
    from jaxllm.execution.options import tracing
    from jaxllm.sampling.processors import JNP_FORM, check_traceable, on_host, traced

    with tracing():
        check_traceable(traced(processors), vocab_size)
    classes = on_host(processors)
    if classes and num_devices > 1:
        message = (
            f"logits_processors: {classes[0].__name__} is a class, which runs for one device, not for {num_devices}"
        )
        raise VLLMValidationError(f"{message}; write {JNP_FORM}.", parameter="logits_processors", value=classes[0])


def _resolve_structured_outputs(group: StructuredOutputsConfig | None) -> StructuredOutputsConfig:
    config = group or StructuredOutputsConfig()
    if config.backend in OTHER_GRAMMARS:
        logger.warning("structured_outputs_config: llguidance does the work of backend=%r.", config.backend)
    return config


def _resolve_max_logprobs(requested: int, vocab_size: int) -> int:
    return vocab_size if requested == -1 else min(requested, vocab_size)

"""Resolve the longest sequence, and the limits of a step: tokens, requests, block size, and the chunks of prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.hardware import has_large_memory
from jaxllm.resolve.resolve_pooling import is_causal
from jaxllm.scheduling.config import StepTarget

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments
    from jaxllm.execution.mesh import Device
    from jaxllm.models.config import ModelConfig
    from jaxllm.resolve.pooling_settings import PoolingSettings
    from jaxllm.resolve.resolve_pooling import Resolved

_DEFAULT_BLOCK_SIZE: Mapping[str, int] = {"cpu": 128, "gpu": 64, "tpu": 64}
_ENCODER_BLOCK_SIZE: Mapping[str, int] = {"cpu": 16}
"""Block sizes of models that keep no keys between steps. A CPU's kernel reads whole blocks, and texts are short."""
_DEFAULT_NUM_BATCHED_TOKENS: Mapping[str, int] = {"cpu": 512, "gpu": 2048, "tpu": 2048}
_DEFAULT_NUM_SEQS = 256
_LARGE_NUM_BATCHED_TOKENS, _LARGE_ONLINE_TOKENS, _LARGE_NUM_SEQS = 16384, 8192, 1024
"""The defaults of a large GPU, vLLM's: fewer tokens where streams wait for a step."""
_CPU_TARGET = StepTarget(seconds=0.15, by_decodes=1.75, by_prompts=2.0)
"""How long steps with streams may take on a CPU, where a full step takes seconds: as fast as people read."""

logger = logging.getLogger(__name__)


def resolve_max_model_len(args: EngineArguments, resolved: Resolved) -> tuple[int, bool]:
    """Return the longest sequence, and whether the engine may lower it to what its KV cache holds.

    If the user leaves it open, it is the length that the checkpoint's files name, at most the model's context. Nothing
    limits a model in which no layer attends: its context is a default alone.
    """
    requested, context = cast(int | None, args.max_model_len), _context_length(resolved.model_config)
    if context < 1:
        raise VLLMValidationError(
            "the RoPE scaling of config.json leaves a context of no token: its factor is far below 1. "
            "Mend it with hf_overrides={'rope_scaling': ...}.",
            parameter="max_model_len",
            value=requested,
        )
    if requested is None or requested == -1:
        return min(resolved.max_length or context, context), True
    if requested > context and any(layer.attends for layer in resolved.model_config.layers):
        is_learned = not resolved.model_config.ropes
        way_out = "Lower it, or extend the context with hf_overrides if the model was made for that."
        raise VLLMValidationError(
            f"max_model_len={requested} is longer than the model's context of {context} tokens. "
            + ("Lower it: the model has learned no more positions." if is_learned else way_out),
            parameter="max_model_len",
            value=requested,
        )
    return requested, False


def _context_length(config: ModelConfig) -> int:
    """Return the longest sequence that the model is made for, with RoPE scaling where it extends the config's length.

    Linear, dynamic and yarn scaling extend it if all layers share one table, as in vLLM; Gemma 3's length includes it.
    """
    length = config.max_position_embeddings
    if len(config.ropes) != 1:
        return length
    rope = config.ropes[0]
    if rope.rope_type == "linear":
        return int(length * rope.factor)
    if rope.rope_type == "dynamic":
        return max(length, int(rope.max_position_embeddings * rope.factor))
    if rope.rope_type == "yarn":
        return max(length, int(rope.original_max_position_embeddings * rope.factor))
    return length


def resolve_limits(
    args: EngineArguments, platform: str, device: Device, max_model_len: int, resolved: Resolved, *, is_online: bool
) -> dict[str, Any]:
    """Fill in the limits that depend on the platform, on the engine's use, and on one another."""
    pooling = resolved.pooling
    runs_whole = pooling is not None and pooling.runs_whole and resolved.runner_type == "pooling"
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        if runs_whole and getattr(args, name):
            logger.warning("%s=True has no effect: prompts go through this model in one step", name)
    chunked = args.enable_chunked_prefill is not False and not runs_whole
    sizes = args.cudagraph_capture_sizes
    default_tokens, default_seqs = _default_step(platform, device, is_online=is_online)
    tokens = _resolve_step(args, default_tokens, max_model_len, chunked=chunked, pooling=pooling)
    if sizes and (beyond := [size for size in sizes if size > tokens]):
        message = "cudagraph_capture_sizes: no step has %s tokens, since max_num_batched_tokens is %d"
        logger.warning(message, ", ".join(map(str, beyond)), tokens)
    return {
        "block_size": args.block_size or _default_block_size(platform, resolved.model_config),
        "max_num_batched_tokens": tokens,
        "cudagraph_capture_sizes": None if sizes is None else tuple(sizes),
        "max_num_seqs": args.max_num_seqs or min(default_seqs, tokens),
        "max_num_seqs_can_shrink": args.max_num_seqs is None,
        "enable_prefix_caching": args.enable_prefix_caching is not False and not runs_whole,
        "enable_chunked_prefill": chunked,
        "step_target": _resolve_step_target(args, platform, chunked=chunked, is_online=is_online),
        "async_scheduling": args.async_scheduling is not False,
    }


def _default_step(platform: str, device: Device, *, is_online: bool) -> tuple[int, int]:
    """Return the tokens and the sequences of a step where the user sets none."""
    if platform == "gpu" and has_large_memory(device):
        return _LARGE_ONLINE_TOKENS if is_online else _LARGE_NUM_BATCHED_TOKENS, _LARGE_NUM_SEQS
    return _DEFAULT_NUM_BATCHED_TOKENS[platform], _DEFAULT_NUM_SEQS


def _resolve_step_target(args: EngineArguments, platform: str, *, chunked: bool, is_online: bool) -> StepTarget | None:
    """Return how long steps with streams may take, None for any time. Raises VLLMValidationError for whole prompts."""
    milliseconds = args.itl_target_ms
    if milliseconds is None:
        return _CPU_TARGET if platform == "cpu" and is_online and chunked else None
    if milliseconds and not chunked:
        raise VLLMValidationError(
            f"itl_target_ms={milliseconds:g} cuts prompts into chunks, and this engine takes them whole: leave it out.",
            parameter="itl_target_ms",
            value=milliseconds,
        )
    return StepTarget(milliseconds / 1e3) if milliseconds else None


def _default_block_size(platform: str, model_config: ModelConfig) -> int:
    default = _DEFAULT_BLOCK_SIZE[platform]
    return default if is_causal(model_config) else _ENCODER_BLOCK_SIZE.get(platform, default)


def _resolve_step(
    args: EngineArguments, default: int, max_model_len: int, *, chunked: bool, pooling: PoolingSettings | None
) -> int:
    """Return the most tokens of a step, at least the longest prompt's if some prompts need a single step."""
    tokens = args.max_num_batched_tokens
    if tokens is None:
        longest = max_model_len if not chunked or (pooling is not None and pooling.runs_whole_tasks) else 0
        return max(default, args.max_num_seqs or 0, longest)
    if (not chunked or (pooling is not None and pooling.runs_whole_tasks)) and tokens < max_model_len:
        by_user = args.enable_chunked_prefill is False
        reason = "with enable_chunked_prefill=False" if by_user else "since prompts go through this model in one step"
        raise VLLMValidationError(
            f"max_num_batched_tokens={tokens} must be at least max_model_len={max_model_len} {reason}. "
            f"Leave it out, or set max_model_len={tokens}.",
            parameter="max_num_batched_tokens",
            value=tokens,
        )
    return tokens


def check_attention_chunks(model_config: ModelConfig, limits: Mapping[str, Any]) -> None:
    """Refuse settings with attention chunks that do not begin with a block and with a step."""
    for size in sorted({layer.attention_chunk for layer in model_config.layers if layer.attention_chunk is not None}):
        block_size = limits["block_size"]
        if size % block_size:
            raise VLLMValidationError(
                f"block_size={block_size} must divide {size}, the tokens of the chunks within which layers attend "
                "(attention_chunk_size).",
                parameter="block_size",
                value=block_size,
            )
        if not limits["enable_chunked_prefill"]:
            raise VLLMValidationError(
                f"enable_chunked_prefill=False takes prompts whole, but layers attend within chunks of {size} tokens, "
                f"and a step takes one: leave it out, or set max_model_len to {size} or less.",
                parameter="enable_chunked_prefill",
                value=False,
            )


def check_offloading(args: EngineArguments, *, caches_prefixes: bool, has_draft: bool) -> None:
    """Raise VLLMValidationError for kv_offloading_size with settings that it does not go with."""
    if args.kv_offloading_size is None:
        if args.kv_cache_folder is not None:
            message = f"kv_cache_folder={args.kv_cache_folder!r} keeps what the host keeps: set kv_offloading_size too."
            raise VLLMValidationError(message, parameter="kv_cache_folder", value=args.kv_cache_folder)
        return
    reason = None
    if not caches_prefixes:
        reason = "blocks come back as hits of the prefix cache, which is off: set enable_prefix_caching"
    elif args.nnodes > 1:
        reason = "a model that spans several hosts keeps its blocks on its devices: take one host"
    elif has_draft:
        reason = "the blocks of a draft model are not kept: take a method without a model in speculative_config"
    if reason is not None:
        message = f"kv_offloading_size={args.kv_offloading_size:g}: {reason}, or leave kv_offloading_size out."
        raise VLLMValidationError(message, parameter="kv_offloading_size", value=args.kv_offloading_size)

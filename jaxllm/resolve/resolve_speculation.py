"""Settle how tokens are guessed ahead, last of all: a draft model runs like the model that it drafts for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxllm.config.arguments import EngineArguments
from jaxllm.config.speculative import GROUP, HEADS
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxllm.execution.kv_pool import FeatureGroup
    from jaxllm.resolve.engine_config import EngineConfig
    from jaxllm.resolve.resolve_pooling import Resolved
    from jaxllm.speculation.drafter import SpeculationSettings

_FREE_ROWS: Mapping[str, float] = {"cpu": 8.0, "gpu": 256.0, "tpu": 256.0}
"""The number of rows with which a step takes about twice as long as with one row, when all weights are read."""


def resolve_speculation(args: EngineArguments, resolved: Resolved, platform: str) -> SpeculationSettings | None:
    """Settle how tokens are guessed ahead, or refuse it where it is impossible."""
    config = args.speculation()
    if config is None:
        return None
    if resolved.runner_type != "generate":
        message = f"{GROUP} is for models that generate. Leave it out."
        raise VLLMValidationError(message, parameter=GROUP, value=config.method)
    return config.settings(_FREE_ROWS[platform])


_SHARED_ARGUMENTS = (
    "cudagraph_capture_sizes",
    "attention_config",
    "linear_backend",
    "batch_invariant",
    "enforce_eager",
    "seed",
    "hf_token",
    "download_dir",
    "gpu_memory_utilization",
    "use_tqdm_on_load",
    "safetensors_load_strategy",
    "safetensors_prefetch_num_threads",
    "safetensors_prefetch_block_size",
    "model_loader_extra_config",
)
"""The arguments that a draft model has from the engine's model."""


def draft_arguments(config: EngineConfig) -> EngineArguments | None:
    """Return the arguments of the draft model of an otherwise settled engine; None if it has none."""
    args, speculative = config.args, config.args.speculation()
    if speculative is None or speculative.drafter not in ("draft_model", *HEADS):
        return None
    if shared_group(config) is None:
        message = f"{GROUP}: {config.model_config.architecture} keeps no layer's keys and values to the end"
        message += ", whose blocks a draft model's would go by. Use method='ngram' or 'suffix'."
        raise VLLMValidationError(message, parameter=GROUP, value=speculative.drafter)
    for name in ("draft_tensor_parallel_size", "tensor_parallel_size"):
        size = getattr(speculative, name)
        if size not in (None, config.mesh.size):
            message = f"{GROUP}: {name}={size} must be {config.mesh.size}, the devices of both models."
            raise VLLMValidationError(message, parameter=GROUP, value=size)
    is_own = speculative.drafter == "mtp"
    model = args.model if is_own else speculative.model
    assert model is not None  # SpeculativeConfig has checked it
    try:
        return EngineArguments(
            model=model,
            revision=args.revision if is_own else speculative.revision,
            hf_overrides=_head_overrides(config, speculative.drafter),
            # Features and shared tables have the model's dtype.
            dtype=config.dtype if speculative.drafter in HEADS else "auto",
            runner="generate",
            generation_config="vllm",
            skip_tokenizer_init=True,
            language_model_only=True,
            quantization=args.quantization if is_own else speculative.quantization,
            kv_cache_dtype=speculative.kv_cache_dtype or "auto",
            max_model_len=speculative.max_model_len,
            mesh=config.mesh,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            load_format="dummy" if args.load_format == "dummy" else "auto",
            **{name: getattr(args, name) for name in _SHARED_ARGUMENTS},
        )
    except VLLMValidationError as error:
        raise refused_draft(model, error) from error


def _head_overrides(config: EngineConfig, method: str) -> dict[str, Any]:
    """Return the settings that a draft head's config.json lacks: its kind, and the model's sizes."""
    from jaxllm.models.families.eagle3 import EAGLE3_HEAD
    from jaxllm.models.families.mtp import MTP_HEADS

    architecture = config.model_config.architecture
    match method:
        case "mtp" if config.checkpoint.is_gguf:
            message = f"{GROUP}: method='mtp' is for safetensors: a GGUF file's further layers are not read."
            raise VLLMValidationError(message, parameter=GROUP, value=method)
        case "mtp" if architecture in MTP_HEADS:
            return {**config.args.hf_overrides, "architectures": [MTP_HEADS[architecture]]}
        case "mtp":
            message = f"{GROUP}: method='mtp' is for {', '.join(MTP_HEADS)}, and the model is {architecture}."
            raise VLLMValidationError(message, parameter=GROUP, value=method)
        case "eagle3":
            return {"architectures": [EAGLE3_HEAD], "num_target_layers": config.model_config.num_layers}
        case _:
            return {}


def refuse_head(config: EngineConfig) -> None:
    """Refuse a draft head as an engine's own model."""
    if config.model_config.draft_head is not None:
        model = config.args.model
        message = f"model={shown(model)} is a draft head, which guesses another model's tokens: name that model here, "
        message += f"and the head in {GROUP}."
        raise VLLMValidationError(message, parameter="model", value=model)


def with_draft(config: EngineConfig, draft: EngineConfig) -> EngineConfig:
    """Return the settings of an engine with its draft model's, or refuse the draft model."""
    _check_draft(config, draft)
    # It shares block tables that keep all blocks.
    groups = tuple(dataclasses.replace(group, window=None) for group in draft.kv_groups)
    draft = dataclasses.replace(draft, ops=draft.ops._replace(kv_groups=groups), reads=_features_for(config, draft))
    return dataclasses.replace(config, draft=draft)


def _features_for(config: EngineConfig, draft: EngineConfig) -> FeatureGroup | None:
    """Return the features that are kept for a draft head; None for a draft model of another kind."""
    from jaxllm.execution.kv_pool import FeatureGroup

    head, group = draft.model_config.draft_head, shared_group(config)
    if head is None or group is None:
        return None
    size, num_shards = head.features.size, config.mesh.size
    return FeatureGroup(
        size=size,
        dtype=config.dtype,
        block_size=config.block_size,
        group=group,
        num_shards=num_shards if size % num_shards == 0 else 1,
    )


def _check_draft(config: EngineConfig, draft: EngineConfig) -> None:
    """Refuse a draft model that cannot run beside the model, or has other tokens."""
    problem = _head_problem(config, draft)
    if any(layer.state is not None for layer in draft.model_config.layers):
        problem = "has recurrent state, which a wrong guess would spoil"
    elif any(group.attention_chunk is not None or not group.causal for group in draft.kv_groups):
        problem = "has layers that attend within chunks, or ahead"
    elif draft.model_config.vocab_size != config.model_config.vocab_size and not _have_same_tokens(config, draft):
        problem = f"has other tokens than {config.args.model}, {draft.model_config.vocab_size} in place of "
        problem += str(config.model_config.vocab_size)
    if problem is not None:
        message = f"{GROUP}: the draft model {draft.args.model} {problem}. Use another one, or method='ngram'."
        raise VLLMValidationError(message, parameter=GROUP, value=draft.args.model)


def _head_problem(config: EngineConfig, draft: EngineConfig) -> str | None:
    """Return why a draft head does not fit the model, or is not wanted; None if all is well."""
    head, model = draft.model_config.draft_head, config.model_config
    assert config.speculation is not None
    if head is None:
        return None
    if config.speculation.method not in HEADS:
        return "is a draft head, which needs method='eagle3' or 'mtp'"
    num_read = max(1, len(head.features.layers)) * model.hidden_size
    if head.features.size != num_read:
        return f"reads {head.features.size} numbers of each token, and {config.args.model} has {num_read}"
    if any(not 0 <= layer <= model.num_layers for layer in head.features.layers):
        return f"reads layers {head.features.layers}, and {config.args.model} has {model.num_layers}"
    return None


def shared_group(config: EngineConfig) -> int | None:
    """Return the cache group whose block tables keep all blocks of a request; None if there is none."""
    kept = (number for number, group in enumerate(config.kv_groups) if not group.is_bounded and group.causal)
    return next(kept, None)


def refused_draft(model: str, error: VLLMValidationError) -> VLLMValidationError:
    """Return the error for a draft model with refused arguments."""
    message = f"{GROUP}: the draft model {shown(model)} cannot be used: {error}"
    return VLLMValidationError(message, parameter=GROUP, value=model)


def _have_same_tokens(config: EngineConfig, draft: EngineConfig) -> bool:
    """Return whether two models have the same tokenizer although their embeddings differ in rows."""
    from jaxllm.text.tokenizer import load_tokenizer

    try:
        tokenizers = [load_tokenizer(each.checkpoint, config.cache_dir) for each in (config, draft)]
    except VLLMValidationError:  # a checkpoint has no tokenizer
        return False
    first, second = (tokenizer.backend.get_vocab() for tokenizer in tokenizers)
    return first == second

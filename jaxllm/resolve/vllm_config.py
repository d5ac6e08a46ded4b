"""`llm.llm_engine.vllm_config`: the settings of an engine, under the names that programs read in vLLM.

They are plain data, which msgpack carries from the core's process to the front end's.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxllm.config.groups import AttentionConfig, ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.pooler import PoolerConfig
from jaxllm.config.profiler import ProfilerConfig
from jaxllm.resolve.engine_config import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of the model and of its requests."""

    model: str
    served_model_name: str
    """The first of the model's served names, for metrics."""
    tokenizer: str
    revision: str | None
    tokenizer_revision: str | None
    skip_tokenizer_init: bool
    dtype: str
    """The dtype of weights and activations by its name, such as "bfloat16"."""
    quantization: str | None
    max_model_len: int
    """The length of the longest sequence, lowered to what the KV cache holds if the user left it open."""
    seed: int
    max_logprobs: int
    logprobs_mode: str
    enforce_eager: bool
    batch_invariant: bool
    """True if outputs do not depend, to the bit, on what else runs."""
    architecture: str
    """The model's class, as config.json names it."""
    vocab_size: int
    hidden_size: int
    head_dim: int
    num_kv_heads: int
    """The number of KV heads over all devices."""
    hf_config_json: str = dataclasses.field(repr=False)
    """The text of config.json, `hf_overrides` included; numbers in it may be of any size, infinite or NaN."""
    runner_type: str = "generate"
    """What the engine is for: "generate" or "pooling"."""
    convert_type: str = "none"
    """The conversion of a model that generates: "none", "embed" or "classify"."""
    pooler_config: PoolerConfig | None = None
    """The settled settings of pooling; None if it only generates."""
    is_matryoshka: bool = False
    """True if requests may cut embeddings to fewer dimensions."""
    matryoshka_dimensions: list[int] | None = None
    embedding_size: int | None = None
    """The size of one pooling output; None if there is none."""

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """Return config.json, `hf_overrides` included, as transformers' object."""
        from jaxllm.loading.hf import AutoConfig, PreTrainedConfig

        values = json.loads(self.hf_config_json)
        try:
            return AutoConfig.for_model(**values)
        except (TypeError, ValueError):  # no model_type, or one that transformers does not know
            return PreTrainedConfig(**values)

    @property
    def hf_text_config(self) -> PreTrainedConfig:
        """Return the part of `hf_config` that describes the language model."""
        return self.hf_config.get_text_config()

    @property
    def architectures(self) -> list[str]:
        """Return the model's class in a list, as config.json has it."""
        return [self.architecture]

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """Return the size of the hidden state."""
        return self.hidden_size

    def get_head_size(self) -> int:
        """Return the size of an attention head."""
        return self.head_dim

    def get_total_num_kv_heads(self) -> int:
        """Return the number of KV heads over all devices."""
        return self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The settings of the KV cache."""

    block_size: int
    gpu_memory_utilization: float
    cache_dtype: str
    """The dtype of the KV cache by its name."""
    enable_prefix_caching: bool
    num_gpu_blocks: int
    """The number of KV blocks, including block 0, which padding writes to."""
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The settings of the scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    policy: str
    async_scheduling: bool
    stream_interval: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The devices that the model is spread over."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    nnodes: int = 1

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return self.tensor_parallel_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The kind of the devices."""

    device_type: str
    """The platform's name: "cpu", "gpu" or "tpu"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The adapters that requests may name."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dtype: str


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are guessed ahead."""

    method: str
    num_speculative_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """The settings of logs, metrics and traces."""

    disable_log_stats: bool
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    otlp_traces_endpoint: str | None
    """The address that a span of each request is sent to; None if there are no traces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """All settings of an engine, in vLLM's groups; read only."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    device_config: DeviceConfig
    attention_config: AttentionConfig
    """The settled kernels of attention, by name."""
    observability_config: ObservabilityConfig
    structured_outputs_config: StructuredOutputsConfig
    reasoning_config: ReasoningConfig | None
    profiler_config: ProfilerConfig | None
    speculative_config: SpeculativeConfig | None = None
    """None if no tokens are guessed ahead."""
    lora_config: LoRAConfig | None = None
    """None if requests can name no adapters."""


def _speculative(config: EngineConfig) -> SpeculativeConfig | None:
    settings = config.speculation
    return None if settings is None else SpeculativeConfig(settings.method, settings.num_speculative_tokens)


def vllm_config(config: EngineConfig, *, num_blocks: int, max_model_len: int) -> VllmConfig:
    """Return an engine's settings in vLLM's form; its KV cache has `num_blocks` and settled `max_model_len`."""

    args, model, pooling = config.args, config.model_config, config.pooling
    group = config.kv_groups[0]
    settings = vars(args) | vars(config)  # what is settled hides what the user gave

    def pick(kind: Any, **fields: Any) -> Any:
        names = [field.name for field in dataclasses.fields(kind) if field.name not in fields]
        return kind(**fields, **{name: settings[name] for name in names})

    return pick(
        VllmConfig,
        model_config=pick(
            ModelConfig,
            served_model_name=(args.served_model_name or [args.model])[0],
            tokenizer=args.tokenizer or args.model,
            max_model_len=max_model_len,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            head_dim=model.layers[0].head_dim,
            num_kv_heads=model.layers[0].num_kv_heads,
            hf_config_json=json.dumps(config.hf_config),
            is_matryoshka=pooling is not None and pooling.is_matryoshka,
            matryoshka_dimensions=None if pooling is None else pooling.matryoshka_dimensions,
            embedding_size=None if pooling is None else pooling.output_size,
        ),
        cache_config=pick(CacheConfig, num_gpu_blocks=num_blocks, cache_dtype=str(group.attention.shape.kv_dtype)),
        scheduler_config=pick(SchedulerConfig, max_model_len=max_model_len, policy=args.scheduling_policy),
        parallel_config=ParallelConfig(
            tensor_parallel_size=config.mesh.size,
            data_parallel_size=args.data_parallel_size,
            nnodes=args.nnodes,
        ),
        device_config=DeviceConfig(device_type=config.platform),
        attention_config=AttentionConfig(backend=group.attention.implementation if group.num_layers else None),
        observability_config=pick(ObservabilityConfig),
        speculative_config=_speculative(config),
        lora_config=pick(LoRAConfig) if args.enable_lora else None,
    )

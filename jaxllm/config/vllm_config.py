"""`llm.llm_engine.vllm_config`: the settings that an engine runs by, under the names that programs read in vLLM."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxllm.config.engine_config import EngineConfig
from jaxllm.config.groups import ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.profiler import ProfilerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of the model and of its requests."""

    model: str
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
    engine_config: EngineConfig = dataclasses.field(repr=False)
    """All settings, as jaxllm names them."""

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """Return config.json, `hf_overrides` included, as transformers' object."""
        from jaxllm.loading.hf import AutoConfig, PreTrainedConfig

        values = dict(self.engine_config.hf_config)
        try:
            return AutoConfig.for_model(**values)
        except (TypeError, ValueError):  # no model_type, or one that transformers does not know
            return PreTrainedConfig(**values)

    @property
    def hf_text_config(self) -> PreTrainedConfig:
        """Return the part of `hf_config` that describes the language model."""
        return self.hf_config.get_text_config()

    @property
    def architecture(self) -> str:
        """Return the model's class, as config.json names it."""
        return self.engine_config.model_config.architecture

    @property
    def architectures(self) -> list[str]:
        """Return the model's class in a list, as config.json has it."""
        return [self.architecture]

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        return self.engine_config.model_config.vocab_size

    def get_hidden_size(self) -> int:
        """Return the size of the hidden state."""
        return self.engine_config.model_config.hidden_size

    def get_head_size(self) -> int:
        """Return the size of an attention head."""
        return self.engine_config.model_config.head_dim

    def get_total_num_kv_heads(self) -> int:
        """Return the number of KV heads over all devices."""
        return self.engine_config.model_config.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The settings of the KV cache."""

    block_size: int
    gpu_memory_utilization: float
    cache_dtype: str
    """The dtype of the KV cache by its name."""
    enable_prefix_caching: bool
    num_gpu_blocks: int
    """The number of KV blocks, block 0 included, which is padding's."""
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

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return self.tensor_parallel_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """All settings of an engine, in vLLM's groups; changing them is not possible, and would change nothing."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    structured_outputs_config: StructuredOutputsConfig
    reasoning_config: ReasoningConfig | None
    profiler_config: ProfilerConfig | None


def vllm_config(config: EngineConfig, *, num_blocks: int, max_model_len: int) -> VllmConfig:
    """Return an engine's settings in vLLM's form; its KV cache has `num_blocks` and settled `max_model_len`."""

    def pick(kind: Any, **settled: Any) -> Any:
        names = [field.name for field in dataclasses.fields(kind) if field.name not in settled]
        return kind(**settled, **{name: getattr(config, name) for name in names})

    return pick(
        VllmConfig,
        model_config=pick(
            ModelConfig, tokenizer=config.tokenizer or config.model, max_model_len=max_model_len, engine_config=config
        ),
        cache_config=pick(CacheConfig, num_gpu_blocks=num_blocks, cache_dtype=str(config.attention.shape.kv_dtype)),
        scheduler_config=pick(SchedulerConfig, max_model_len=max_model_len, policy=config.scheduling_policy),
        parallel_config=ParallelConfig(tensor_parallel_size=config.mesh.size),
    )

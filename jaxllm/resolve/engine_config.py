"""`EngineConfig`: the checked and resolved settings of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jaxllm.config.groups import ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.pooler import PoolerConfig
from jaxllm.config.profiler import ProfilerConfig
from jaxllm.resolve.pooling_settings import PoolingSettings

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllm.execution.kv_pool import FeatureGroup, KVGroup, StateGroup
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.models.adapters import AdapterShape
    from jaxllm.models.config import ModelConfig
    from jaxllm.sampling.processors import LogitsProcessor
    from jaxllm.speculation.drafter import SpeculationSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings that an engine depends on, checked and resolved.

    They stay in the process of the core; `EngineReady` takes plain data to the front end.
    """

    model: str
    tokenizer: str | None
    """The folder, file or hub id of the tokenizer; None is the checkpoint's own."""
    tokenizer_mode: str
    """The mode as the user gave it: all modes read tokenizer.json, and "mistral" logs that it does."""
    tokenizer_revision: str | None
    skip_tokenizer_init: bool
    revision: str | None
    hf_token: str | bool | None = dataclasses.field(repr=False)
    download_dir: str | None
    load_format: str
    checkpoint: Checkpoint
    hf_config: Mapping[str, Any]
    """The checkpoint's config.json with `hf_overrides` in place."""
    model_config: ModelConfig
    runner_type: str
    """What the engine is for: "generate" or "pooling"."""
    convert_type: str
    """The conversion of a model that generates: "none", "embed" or "classify"."""
    pooler_config: PoolerConfig | None
    """The settled settings of pooling by vLLM's names; None for an engine that only generates."""
    pooling: PoolingSettings | None
    """The settled settings of pooling in jaxllm's form; None for an engine that only generates."""
    dtype: str
    """The dtype of weights and activations: "float32", "bfloat16" or "float16"."""
    quantization: str | None
    """How weights are rounded when they are loaded: "int8", "int4" or "fp8"; None if they stay as in the
    checkpoint."""
    mesh: Mesh
    """The devices that the model is spread over."""
    kv_groups: tuple[KVGroup, ...]
    """The cache groups, each with the attention op of one device's heads."""
    state_groups: tuple[StateGroup, ...]
    """The groups of layers with recurrent state."""
    max_model_len: int
    max_model_len_can_shrink: bool
    """True if the user did not set it: the engine may then lower it to what the KV cache holds."""
    seed: int
    max_logprobs: int
    """The most log-probabilities per position: at most the vocabulary's size."""
    logprobs_mode: str
    """The meaning of log-probabilities: "raw_logprobs", "processed_logprobs", "raw_logits" or "processed_logits"."""
    logits_processors: tuple[LogitsProcessor | type, ...]
    """Functions that steps trace, and classes that run on the host."""
    batch_invariant: bool
    """True if outputs do not depend, to the bit, on what else runs."""
    structured_outputs_config: StructuredOutputsConfig
    reasoning_config: ReasoningConfig | None
    """The model's reasoning markers; None means <think> and </think>, if the tokenizer has them."""
    stream_interval: int
    """The fewest new tokens per streamed output."""
    linear_backend: str
    """The kernels of matmuls: "auto", or "cpu_int8" to round the inputs of quantized weights to 8 bits."""
    enforce_eager: bool
    block_size: int
    kv_cache_dtype: str
    """The dtype as the user gave it: "auto" is the model's."""
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    max_num_seqs: int
    max_num_seqs_can_shrink: bool
    """True if the engine may lower it where the sequences' recurrent states would take most of the memory."""
    max_num_batched_tokens: int
    cudagraph_capture_sizes: tuple[int, ...] | None
    """The tokens of steps that get a program, besides the largest; None: from the smallest on, doubled each time."""
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    scheduling_policy: Literal["fcfs", "priority"]
    scheduler_cls: type | None
    async_scheduling: bool
    speculation: SpeculationSettings | None
    """How tokens are guessed ahead; None if they are not."""
    draft: EngineConfig | None = None
    """The settings of the draft model, which runs on the same devices; None if no model guesses."""
    reads: FeatureGroup | None = None
    """The features of the other model that this one reads, if this is a draft head; None for other models."""
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dtype: str
    generation_config: Mapping[str, Any]
    """The HF generation config in force; its eos_token_id ends outputs."""
    default_sampling_params: Mapping[str, Any]
    """Keywords of SamplingParams for requests without their own."""
    max_output_tokens: int | None
    """The most tokens that a request to a server may ask for; None sets no limit."""
    chat_template: str | None
    """The template's text; None is the tokenizer's own."""
    disable_log_stats: bool
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    otlp_traces_endpoint: str | None
    """The address that the front end sends traces to; the core only passes it on."""
    profiler_config: ProfilerConfig | None
    use_tqdm_on_load: bool
    served_model_name: list[str] | None
    """The names that users call the model by; None is `model`."""
    data_parallel_size: int
    """The number of replicas at the start; each settles its own configuration."""
    nnodes: int
    """The hosts over which the model is spread."""
    platform: str
    """The kind of the devices: "cpu", "gpu" or "tpu"."""
    cache_dir: str

    @property
    def adapter_shape(self) -> AdapterShape | None:
        """Return the slots and rank of adapters; None if requests have no adapters."""
        from jaxllm.models.adapters import AdapterShape

        return AdapterShape(self.max_loras, self.max_lora_rank) if self.enable_lora else None

    @property
    def generates(self) -> bool:
        """Return whether requests may generate."""
        return self.runner_type == "generate"

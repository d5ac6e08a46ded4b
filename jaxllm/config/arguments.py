"""`EngineArguments`: the supported engine arguments by vLLM's names, with their kinds and flags."""

# Fields are declared by calls that make dataclass fields, which ruff takes for shared default values.
# ruff: noqa: RUF009

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from jaxllm.config.formats import CHECKPOINT_QUANTIZATIONS, KV_CACHE_DTYPES, QUANTIZATIONS
from jaxllm.config.groups import AttentionConfig, LoaderSettings, ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.kinds import (
    Choice,
    ClassName,
    DeviceMesh,
    Dtype,
    Group,
    Integer,
    Json,
    Names,
    Number,
    Sizes,
    Switch,
    Text,
    Token,
    add_flags,
    argument,
    check_fields,
    required,
)
from jaxllm.config.pooler import PoolerConfig
from jaxllm.config.portable import portable
from jaxllm.config.profiler import ProfilerConfig
from jaxllm.config.speculative import MAX_DRAFTS, METHODS, SpeculativeConfig
from jaxllm.config.traces import check_traces_endpoint
from jaxllm.config.unsupported_arguments import UnsupportedArguments
from jaxllm.exceptions import VLLMValidationError, unknown_parameter
from jaxllm.params.checks import INT32_MAX
from jaxllm.parsers.reasoning import REASONING_PARSERS

_BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512)
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
_MAX_NUM_SEQS = 65_536
_MAX_NUM_BATCHED_TOKENS = 2**20
_MAX_LORAS = 1024
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of max_lora_rank that vLLM takes."""

GONE: Mapping[str, str] = {
    "task": "see runner and convert",
    "override_pooler_config": "see pooler_config",
    "swap_space": "preempted requests are recomputed",
    "preemption_mode": "preempted requests are recomputed",
    "max_seq_len_to_capture": "programs are compiled per number of tokens; see max_num_batched_tokens",
    "device": "set the environment variable JAX_PLATFORMS to cpu, cuda or tpu",
    "rope_scaling": "use hf_overrides={'rope_scaling': ...}",
    "rope_theta": "use hf_overrides={'rope_theta': ...}",
    "num_scheduler_steps": "host and device overlap by themselves",
    "num_lookahead_slots": "see speculative_config",
    "speculative_model": "see speculative_config",
    "num_speculative_tokens": "see speculative_config",
    "guided_decoding_backend": "see structured_outputs_config",
    "use_v2_block_manager": "there is one block manager",
    "enable_prompt_adapter": "see enable_lora",
    "worker_use_ray": "see distributed_executor_backend",
    "tokenizer_pool_size": "tokenizing is in-process",
    "disable_async_output_proc": "see async_scheduling",
    "use_async_output_proc": "see async_scheduling",
}


_MODEL, _LOAD, _CACHE, _SCHEDULER = "ModelConfig", "LoadConfig", "CacheConfig", "SchedulerConfig"
_LORA, _DRAFTS, _MEDIA = "LoRAConfig", "SpeculativeConfig", "MultiModalConfig"


@dataclasses.dataclass
class EngineArguments(UnsupportedArguments):
    """The supported fields of `jaxllm.EngineArgs`. All fields are checked on creation; no file is touched."""

    model: str = required(Text(optional=False), _MODEL, "hub id, folder, or .gguf file")
    runner: str = argument(
        "auto",
        Choice(("auto", "generate", "pooling")),
        _MODEL,
        "what the engine does; auto: as the model is made for. generate with convert=embed does both",
    )
    convert: str = argument(
        "auto",
        Choice(("auto", "none", "embed", "classify")),
        _MODEL,
        "make a model that generates one that pools; auto: to embed, where the runner is pooling",
    )
    pooler_config: PoolerConfig | None = argument(
        None, Group(PoolerConfig), _MODEL, 'how a model pools, as JSON: {"pooling_type": "MEAN"}; default: the model\'s'
    )
    tokenizer: str | None = argument(None, Text(), _MODEL, "hub id or folder of the tokenizer; default: the model's")
    tokenizer_mode: str = argument(
        "auto",
        Choice(("auto", "hf", "fast", "mistral")),
        _MODEL,
        "all of them read tokenizer.json, or else tekken.json",
    )
    skip_tokenizer_init: bool = argument(False, Switch(), _MODEL, "load no tokenizer: token ids in, token ids out")
    dtype: str = argument("auto", Dtype(), _MODEL, "dtype of weights and activations; auto: the checkpoint's")
    seed: int = argument(0, Integer(0, 2**64 - 1), _MODEL, "seed of the requests that have none of their own")
    max_model_len: int | str | None = argument(
        None,
        Integer(-1, INT32_MAX, optional=True, sized=True, words={"auto": -1}),
        _MODEL,
        "longest prompt plus output; default: the model's context; auto or -1: as much of it as fits",
    )
    revision: str | None = argument(None, Text(), _MODEL, "branch, tag or commit of the model")
    tokenizer_revision: str | None = argument(None, Text(), _MODEL, "branch, tag or commit of the tokenizer")
    hf_token: str | bool | None = argument(None, Token(), _MODEL, "access token of the hub; default: the one stored")
    hf_overrides: dict[str, Any] = argument({}, Json(), _MODEL, "values to replace in the model's config.json")
    chat_template: str | None = argument(None, Text(), _MODEL, "Jinja chat template, or a file that holds one")
    generation_config: str = argument(
        "auto", Text(optional=False), _MODEL, "default sampling: auto (the model's), vllm (neutral), or a folder"
    )
    override_generation_config: dict[str, Any] = argument({}, Json(), _MODEL, "values to replace in generation_config")
    max_logprobs: int = argument(20, Integer(-1, INT32_MAX), _MODEL, "most logprobs a request may ask for; -1: all")
    logprobs_mode: str = argument(
        "raw_logprobs",
        Choice(LOGPROBS_MODES),
        _MODEL,
        "logprobs of the model's logits, or of what is sampled",
    )
    batch_invariant: bool | None = argument(
        None,
        Switch(optional=True),
        _MODEL,
        "outputs do not depend, to the bit, on what else runs; default: where it costs nothing (one CPU device)",
    )
    enforce_eager: bool = argument(False, Switch(), _MODEL, "compile nothing ahead of its first use")
    enable_sleep_mode: bool = argument(
        False, Switch(), _MODEL, "taken as in vLLM, where an engine sleeps with it alone; here each one can"
    )
    quantization: str | None = argument(
        None,
        Choice((None, *QUANTIZATIONS, *CHECKPOINT_QUANTIZATIONS)),
        _MODEL,
        "int8, int4, fp8, bitsandbytes: round weights when they are loaded; a checkpoint's own: only checked",
        "-q",
    )
    logits_processors: list[Any] | None = argument(
        None, Names("MODULE:NAME"), _MODEL, "functions (logits_sv, state) -> logits_sv, or classes for the host"
    )
    load_format: str = argument(
        "auto",
        Choice(("auto", "hf", "safetensors", "pt", "mistral", "sharded_state", "gguf", "dummy")),
        _LOAD,
        "form of the weights; pt: PyTorch's .bin; mistral: consolidated.safetensors; dummy: random ones",
    )
    safetensors_load_strategy: str | None = argument(
        None,
        Choice((None, "lazy", "prefetch")),
        _LOAD,
        "prefetch: read the files ahead with several threads, for network disks; default: as they are needed",
    )
    safetensors_prefetch_num_threads: int = argument(8, Integer(1, 64), _LOAD, "the threads that read files ahead")
    safetensors_prefetch_block_size: int = argument(
        16 * 2**20, Integer(4096, 2**30, sized=True), _LOAD, "bytes that such a thread reads at once"
    )
    model_loader_extra_config: LoaderSettings | None = argument(
        None, Group(LoaderSettings), _LOAD, 'older names of these: {"enable_multithread_load": true, "num_threads": 8}'
    )
    download_dir: str | None = argument(None, Text(), _LOAD, "where hub files are kept; default: the hub's cache")
    served_model_name: list[str] | str | None = argument(
        None,
        Names("NAME", single=True),
        _MODEL,
        "what metrics and a server call the model",
    )
    use_tqdm_on_load: bool = argument(True, Switch(), _LOAD, "show a progress bar while weights load")
    tensor_parallel_size: int = argument(
        1, Integer(1, INT32_MAX), "ParallelConfig", "devices to spread the model over", "-tp"
    )
    enable_expert_parallel: bool = argument(
        False, Switch(), "ParallelConfig", "give each device whole experts, as far as their number divides", "-ep"
    )
    mesh: Any = argument(None, DeviceMesh(), "ParallelConfig", argparse.SUPPRESS)
    data_parallel_size: int = argument(
        1, Integer(1, 1024), "ParallelConfig", "replicas of the model, each with devices of its own", "-dp"
    )
    data_parallel_backend: str = argument(
        "mp", Choice(("mp", "ray")), "ParallelConfig", "where replicas run: in processes, or as Ray actors", "-dpb"
    )
    distributed_executor_backend: str | None = argument(
        None,
        Choice((None, "uni", "mp", "ray")),
        "ParallelConfig",
        "ray: the engine's core is an actor of a Ray cluster",
    )
    nnodes: int = argument(
        1,
        Integer(0, 4096, words={"auto": 0}),
        "ParallelConfig",
        "hosts to spread the model over; auto or 0: those of the TPU pod, Slurm step, mpirun or Kubernetes job",
        "-n",
    )
    node_rank: int = argument(
        0, Integer(0, 4095), "ParallelConfig", "this host's number; host 0 has the requests, the others follow it", "-r"
    )
    master_addr: str = argument("127.0.0.1", Text(optional=False), "ParallelConfig", "address of host 0, for all hosts")
    master_port: int = argument(29501, Integer(1, 65535), "ParallelConfig", "free port of host 0, for all hosts")
    disable_custom_all_reduce: bool = argument(False, Switch(), "ParallelConfig", "accepted: there is none to disable")
    block_size: int | None = argument(
        None, Integer(8, 512, optional=True), _CACHE, "tokens per KV block, a power of two; default: 128 (CPU) or 64"
    )
    gpu_memory_utilization: float = argument(
        0.9,
        Number(0.0, 1.0, above_low=True),
        _CACHE,
        "part of the device's memory to use",
        "--device-memory-utilization",
    )
    kv_cache_memory_bytes: int | None = argument(
        None,
        Integer(1, 2**63 - 1, optional=True, sized=True),
        _CACHE,
        "size of a device's KV cache; default: what fits",
    )
    num_gpu_blocks_override: int | None = argument(
        None, Integer(2, INT32_MAX, optional=True), _CACHE, "number of KV blocks, instead of what fits"
    )
    enable_prefix_caching: bool | None = argument(
        None,
        Switch(optional=True),
        _CACHE,
        "reuse the KV blocks of equal prompt beginnings; default: where attention is causal",
    )
    kv_offloading_size: float | None = argument(
        None,
        Number(0.0, 2.0**30, above_low=True, optional=True),
        _CACHE,
        "GiB of the host's memory for KV blocks that the devices evict; default: none are kept",
    )
    kv_offloading_backend: str = argument("native", Choice(("native",)), _CACHE, "what keeps these blocks")
    kv_cache_folder: str | None = argument(
        None, Text(), _CACHE, "folder where these blocks are kept too, and found after a restart; default: none"
    )
    kv_cache_folder_size: float = argument(
        16.0, Number(0.0, 2.0**30, above_low=True), _CACHE, "GiB of files in kv_cache_folder, of all that use it"
    )
    kv_cache_dtype: str = argument(
        "auto", Choice(("auto", *KV_CACHE_DTYPES)), _CACHE, "dtype of the KV cache; auto: the model's; fp8 is fp8_e4m3"
    )
    max_num_batched_tokens: int | None = argument(
        None,
        Integer(1, _MAX_NUM_BATCHED_TOKENS, optional=True, sized=True),
        _SCHEDULER,
        "tokens of one step; default: 512 (CPU), 2048, or for GPUs of 70 GiB 8192 in servers, else 16384",
    )
    cudagraph_capture_sizes: list[int] | None = argument(
        None,
        Sizes(_MAX_NUM_BATCHED_TOKENS),
        "CompilationConfig",
        "tokens of the steps that get a program, besides the largest; default: the smallest, each time twice as many",
    )
    max_num_seqs: int | None = argument(
        None,
        Integer(1, _MAX_NUM_SEQS, optional=True, sized=True),
        _SCHEDULER,
        "requests run together; default: 256, or 1024 for GPUs of 70 GiB",
    )
    long_prefill_token_threshold: int = argument(
        0, Integer(0, INT32_MAX, sized=True), _SCHEDULER, "most prompt tokens of one request in a step; 0: no limit"
    )
    itl_target_ms: float | None = argument(
        None,
        Number(0.0, 3.6e6, optional=True),
        _SCHEDULER,
        "milliseconds between a stream's tokens that others' prompts may cause; 0: no limit; default: in servers on a "
        "CPU 150, or 1.75 times the time without prompts",
    )
    enable_chunked_prefill: bool | None = argument(
        None, Switch(optional=True), _SCHEDULER, "take long prompts in several steps; default: where outputs allow it"
    )
    scheduling_policy: Literal["fcfs", "priority"] = argument(
        "fcfs", Choice(("fcfs", "priority")), _SCHEDULER, "who goes first"
    )
    scheduler_cls: type | str | None = argument(
        None, ClassName(), _SCHEDULER, "a scheduler of your own, constructed as Scheduler(config, clock, files)"
    )
    async_scheduling: bool | None = argument(
        None, Switch(optional=True), _SCHEDULER, "plan a step while the one before runs; default: yes"
    )
    stream_interval: int = argument(1, Integer(1, INT32_MAX), _SCHEDULER, "fewest new tokens per streamed output")
    enable_lora: bool = argument(False, Switch(), _LORA, "let requests name LoRA adapters")
    max_loras: int = argument(1, Integer(1, _MAX_LORAS), _LORA, "adapters in use at the same time")
    max_lora_rank: int = argument(16, Choice(_LORA_RANKS), _LORA, "the largest rank of an adapter")
    max_cpu_loras: int | None = argument(
        None, Integer(1, INT32_MAX, optional=True), _LORA, "adapters kept on the host; default: max_loras"
    )
    lora_dtype: str = argument("auto", Choice(("auto",)), _LORA, "adapters have the weights' dtype")
    hidden_states_layers: list[int] | None = argument(
        None, Sizes(9999, -9999), _MODEL, "layers whose outputs requests may have returned, from 0; -1 is the last"
    )
    steering: str | None = argument(
        None, Text(), _MODEL, "safetensors file of vectors that requests may have added to the residual stream"
    )
    limit_mm_per_prompt: dict[str, Any] = argument(
        {}, Json(), _MEDIA, 'most items in a prompt, as JSON: {"image": 4, "video": 0}; default: 999 of each'
    )
    mm_processor_kwargs: dict[str, Any] = argument(
        {}, Json(), _MEDIA, 'options of the image processor, as JSON: {"max_pixels": 1003520}'
    )
    mm_processor_cache_gb: float = argument(
        4.0, Number(0.0, 2.0**20), _MEDIA, "GiB of processed images that are kept; 0: none"
    )
    media_io_kwargs: dict[str, Any] = argument(
        {}, Json(), _MEDIA, 'which frames of videos are taken, as JSON: {"video": {"num_frames": 16}}; default: 32'
    )
    allowed_local_media_path: str = argument(
        "",
        Text(optional=False, may_be_empty=True),
        _MEDIA,
        "folder whose files requests may name; default: none",
    )
    allowed_media_domains: list[str] | None = argument(
        None, Names("DOMAIN", single=True), _MEDIA, "hosts that images may be fetched from; default: all public ones"
    )
    interleave_mm_strings: bool = argument(
        False, Switch(), _MEDIA, "leave images between texts where a chat template reads texts alone"
    )
    enable_mm_embeds: bool = argument(
        False, Switch(), _MEDIA, "take computed embeddings of images in their place, as rows that the tower would make"
    )
    enable_prompt_embeds: bool = argument(
        False, Switch(), _MEDIA, "take prompts as embeddings of their tokens; for models of text that generate"
    )
    language_model_only: bool = argument(False, Switch(), _MEDIA, "load no vision tower: the model reads text alone")
    speculative_config: SpeculativeConfig | None = argument(
        None,
        Group(SpeculativeConfig),
        _DRAFTS,
        'guess tokens ahead, as JSON: {"method": "ngram"} or "suffix", or {"model": DRAFT}; outputs stay as they are',
        "-sc",
    )
    spec_method: str | None = argument(None, Choice((None, *METHODS)), _DRAFTS, "method of speculative_config")
    spec_model: str | None = argument(None, Text(), _DRAFTS, "model of speculative_config")
    spec_tokens: int | None = argument(
        None, Integer(1, MAX_DRAFTS, optional=True), _DRAFTS, "num_speculative_tokens of speculative_config"
    )
    structured_outputs_config: StructuredOutputsConfig | None = argument(
        None, Group(StructuredOutputsConfig), "StructuredOutputsConfig", "settings of structured outputs, as JSON"
    )
    reasoning_config: ReasoningConfig | None = argument(
        None,
        Group(ReasoningConfig),
        "StructuredOutputsConfig",
        "reasoning_start_str and reasoning_end_str, as JSON; default: <think> and </think> if the tokenizer has them",
    )
    reasoning_parser: str = argument(
        "",
        Choice(("", *REASONING_PARSERS)),
        "StructuredOutputsConfig",
        "how the model marks its reasoning, which a server splits off; by default, or with auto, as its template tells",
    )
    attention_config: AttentionConfig | None = argument(
        None, Group(AttentionConfig), "AttentionConfig", 'as JSON; {"backend": "xla"} turns our own kernels off', "-ac"
    )
    linear_backend: str = argument(
        "auto", Choice(("auto", "cpu_int8", "gpu_fp8")), "KernelConfig", "kernels of matmuls"
    )
    selfcheck: bool = argument(
        True,
        Switch(),
        "KernelConfig",
        "compare kernels with the reference, once, on a kind of GPU or TPU that is new to them",
    )
    disable_log_stats: bool = argument(False, Switch(), "ObservabilityConfig", "log no statistics")
    kv_cache_metrics: bool = argument(
        False, Switch(), "ObservabilityConfig", "measure how long KV blocks keep their content"
    )
    kv_cache_metrics_sample: float = argument(
        0.01,
        Number(0.0, 1.0, above_low=True),
        "ObservabilityConfig",
        "part of the KV blocks that kv_cache_metrics looks at",
    )
    otlp_traces_endpoint: str | None = argument(
        None,
        Text(),
        "ObservabilityConfig",
        "where a span of each request goes, as grpc://localhost:4317 (OTLP; needs jaxllm[otel])",
    )
    profiler_config: ProfilerConfig | None = argument(
        None,
        Group(ProfilerConfig),
        "ProfilerConfig",
        'of start_profile, as JSON: {"profiler": "torch", "torch_profiler_dir": FOLDER}, which is JAX\'s profiler',
    )

    def __new__(cls, *_args: Any, **kwargs: Any) -> Self:
        """Refuse an unknown keyword, naming an alternative, before the dataclass's own TypeError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in kwargs.items():
            if name not in known:
                raise unknown_parameter(cls.__name__, name, value, known, GONE)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check and normalise every argument, without files and JAX."""
        check_fields(self)
        check_traces_endpoint(self.otlp_traces_endpoint)
        if self.block_size is not None and self.block_size not in _BLOCK_SIZES:
            raise VLLMValidationError(
                f"block_size must be a power of two from 8 to 512, got {self.block_size}.",
                parameter="block_size",
                value=self.block_size,
            )
        if self.max_model_len == 0:
            raise VLLMValidationError("max_model_len must be at least 1.", parameter="max_model_len", value=0)
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise VLLMValidationError(
                f"max_num_batched_tokens={tokens} must be at least max_num_seqs={seqs}: each running request needs "
                "one token a step.",
                parameter="max_num_batched_tokens",
                value=tokens,
            )

        if self.reasoning_parser and self.skip_tokenizer_init:
            message = "reasoning_parser needs a tokenizer, which skip_tokenizer_init leaves out."
            raise VLLMValidationError(message, parameter="reasoning_parser", value=self.reasoning_parser)
        self.speculation()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise VLLMValidationError(
                f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}: an adapter in use is "
                "kept on the host too.",
                parameter="max_cpu_loras",
                value=self.max_cpu_loras,
            )

    @property
    def num_reading_threads(self) -> int:
        """Return the number of threads that read weights ahead; 0 for none."""
        extra = self.model_loader_extra_config
        if extra is not None and extra.enable_multithread_load:
            return extra.num_threads
        return self.safetensors_prefetch_num_threads if self.safetensors_load_strategy == "prefetch" else 0

    def speculation(self) -> SpeculativeConfig | None:
        """Return how tokens are guessed ahead: `speculative_config`, or the three short arguments."""
        short = {"method": self.spec_method, "model": self.spec_model, "num_speculative_tokens": self.spec_tokens}
        names = [name for name, value in zip(("method", "model", "tokens"), short.values(), strict=True) if value]
        if not names:
            return self.speculative_config
        if self.speculative_config is not None:
            name = f"spec_{names[0]}"
            message = f"{name} and speculative_config say the same: give one of them."
            raise VLLMValidationError(message, parameter=name, value=getattr(self, name))
        return SpeculativeConfig(**short)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag per argument, with vLLM's names: max_model_len is --max-model-len."""
        add_flags(parser, dataclasses.fields(cls))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Make the arguments from a parsed command line; names that are not engine arguments are left alone."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def portable(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults, in JSON's types, for another process.

        Functions and classes are sent by name. Raises VLLMValidationError for a value without a name, such as a mesh.
        """
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            if value != default:
                values[field.name] = portable(field.name, field.metadata["kind"], value)
        return values

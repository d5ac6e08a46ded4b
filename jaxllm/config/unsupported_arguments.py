"""vLLM's engine arguments that jaxllm does not implement: each takes vLLM 0.32's default, and refuses other values."""

# Fields are declared by calls that make dataclass fields, which ruff takes for shared default values.
# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.config.kinds import unsupported

_ADAPTERS = "an adapter is added to every linear layer that it is for, and shared out over devices as the weights are"
_CHECKPOINT_CODE = "code from a checkpoint is never run; add architectures with jaxllm.register_model(...)"
_DRAFTS = "metrics of drafts are those of the engine"
_EXPERTS = "devices share experts or their widths in one way; see enable_expert_parallel"
_GRAPHS = "XLA compiles; there are no torch or CUDA graph settings"
_KERNELS = "kernels are chosen by platform and shape; see attention_config and linear_backend"
_LOGS = "see Python's logging module and the logger 'jaxllm'"
_MEASURED = "get_metrics() returns all that is measured so far"
_MEDIA = "images and videos are read, processed and encoded in one way; see docs/media.md"
_OFFLOAD = "weights stay on the device; see quantization"
_ONE_ENGINE = "an engine has no pipelines; see tensor_parallel_size, nnodes, mesh and data_parallel_size"
_QUEUE = "the synchronous engine's queue has no bound; see AsyncEngineArgs"
_RECURRENT = "recurrent states and their kernels follow from the model, the platform and max_num_seqs"
_SERVER = "requests are read in the one process of the server"
_SLEEP = "an engine that sleeps gives back all that it has on the device; see sleep()"
_TRANSFER = "KV caches and weights are not exchanged between engines yet"
_UNREAD = ("original/**/*", "consolidated*", "consolidated.safetensors", "consolidated*.safetensors", "*.bin", "*.pt")
"""Patterns of files that are never read."""
_WEIGHTS = "weights are memory-mapped safetensors or GGUF files"


@dataclasses.dataclass(kw_only=True)
class UnsupportedArguments:
    """Each row has an argument's default, the reason why others are refused, and in `also` values that mean the same.

    A row moves to `EngineArguments` once its argument works.
    """

    # The model, its tokenizer and its files
    model_weights: str = unsupported("", "the weights are where model says")
    model_impl: str = unsupported("auto", "models are jaxllm's own", also=("jaxllm",))
    model_class_overrides: dict[str, str] = unsupported({}, "see jaxllm.register_model(...)")
    trust_remote_code: bool = unsupported(False, _CHECKPOINT_CODE)
    code_revision: str | None = unsupported(None, _CHECKPOINT_CODE)
    hf_config_path: str | None = unsupported(None, "config.json is beside the weights; see hf_overrides")
    config_format: str = unsupported(
        "auto", "the model's config.json, else params.json, or GGUF header is read", also=("hf", "mistral")
    )
    diffusion_config: Any = unsupported(None, "no diffusion model runs yet")
    quantization_config: Any = unsupported(None, "see quantization")
    allow_deprecated_quantization: bool = unsupported(False, "see quantization")
    disable_sliding_window: bool = unsupported(False, "layers attend as the model says; see hf_overrides")
    engram_config: Any = unsupported(None, "no model with n-gram embeddings runs yet")
    ignore_patterns: str | list[str] | None = unsupported(
        None,
        "of safetensors, model.safetensors or the files of its index are read, and no others",
        also=(*_UNREAD, *([each] for each in _UNREAD)),
    )
    pt_load_map_location: str | dict[str, str] = unsupported("cpu", _WEIGHTS)
    aux_output_config: Any = unsupported(None, "requests say what their outputs hold; see logprobs", also=({},))
    enable_return_routed_experts: bool = unsupported(False, _EXPERTS)
    return_sampling_mask: bool = unsupported(False, "outputs hold no mask; see logprobs_mode and allowed_token_ids")
    use_fp64_gumbel: bool = unsupported(False, "sampling is in float32")
    enable_trace_replay: bool = unsupported(False, "sampling cannot be forced to a trace; see allowed_token_ids")
    reasoning_parser_plugin: str | None = unsupported(None, "reasoning parsers are jaxllm's own; see reasoning_parser")
    watermark_config: Any = unsupported(None, "outputs are not watermarked")

    # Media
    mm_processor_cache_type: str | None = unsupported("lru", _MEDIA)
    mm_processor_device: str = unsupported("auto", _MEDIA)
    mm_hasher_algorithm: str = unsupported("blake3", _MEDIA)
    mm_shm_cache_max_object_size_mb: int = unsupported(128, _MEDIA)
    mm_encoder_only: bool = unsupported(False, _MEDIA)
    mm_encoder_tp_mode: str = unsupported("weights", _MEDIA)
    mm_encoder_attn_backend: Any = unsupported(None, _MEDIA)
    mm_encoder_attn_dtype: str | None = unsupported(None, _MEDIA)
    mm_encoder_fp8_scale_path: str | None = unsupported(None, _MEDIA)
    mm_encoder_fp8_scale_save_path: str | None = unsupported(None, _MEDIA)
    mm_encoder_fp8_scale_save_margin: float = unsupported(1.5, _MEDIA)
    mm_tensor_ipc: str = unsupported("direct_rpc", _MEDIA)
    mm_ipc_gpu_memory_gb: float = unsupported(0, _MEDIA, also=(0.0,))
    mm_device_do_normalize: bool | None = unsupported(True, _MEDIA, also=(None,))
    skip_mm_profiling: bool = unsupported(False, _MEDIA, also=(True,))
    disable_chunked_mm_input: bool = unsupported(False, "a chunk of a prompt may end inside an image")
    enable_mm_processor_stats: bool = unsupported(False, _MEDIA)
    video_pruning_rate: float | None = unsupported(None, _MEDIA)
    video_pruning_method: str = unsupported("evs", _MEDIA)
    ec_manager_config: Any = unsupported(None, _MEDIA, also=({},))
    ec_transfer_config: Any = unsupported(None, _MEDIA)

    # Processes and devices
    pipeline_parallel_size: int = unsupported(1, _ONE_ENGINE, aliases=("-pp",))
    prefill_context_parallel_size: int = unsupported(1, _ONE_ENGINE, aliases=("-pcp",))
    decode_context_parallel_size: int = unsupported(1, _ONE_ENGINE, aliases=("-dcp",))
    dcp_comm_backend: str | None = unsupported(None, _ONE_ENGINE)
    dcp_q_replicate: bool | None = unsupported(None, _ONE_ENGINE, also=(False,))
    dcp_kv_cache_interleave_size: int = unsupported(1, _ONE_ENGINE)
    cp_kv_cache_interleave_size: int | None = unsupported(None, _ONE_ENGINE)
    data_parallel_rank: int | None = unsupported(None, _ONE_ENGINE, aliases=("-dpn",))
    data_parallel_start_rank: int | None = unsupported(None, _ONE_ENGINE, aliases=("-dpr",))
    data_parallel_size_local: int | None = unsupported(None, _ONE_ENGINE, aliases=("-dpl",))
    data_parallel_address: str | None = unsupported(None, _ONE_ENGINE, aliases=("-dpa",))
    data_parallel_rpc_port: int | None = unsupported(None, _ONE_ENGINE, aliases=("-dpp",))
    data_parallel_hybrid_lb: bool = unsupported(False, _ONE_ENGINE, aliases=("-dph",))
    data_parallel_external_lb: bool = unsupported(False, _ONE_ENGINE, aliases=("-dpe",))
    data_parallel_multi_port_external_lb: bool = unsupported(False, _ONE_ENGINE, aliases=("-dpm",))
    dp_sync_interval: int = unsupported(16, _ONE_ENGINE)
    disable_nccl_for_dp_synchronization: bool | None = unsupported(None, _ONE_ENGINE, also=(False,))
    distributed_timeout_seconds: int | None = unsupported(None, _ONE_ENGINE)
    cpu_distributed_timeout_seconds: int | None = unsupported(None, _ONE_ENGINE)
    device_ids: list[int | str] | None = unsupported(None, "see mesh, CUDA_VISIBLE_DEVICES", also=([],))
    numa_bind: bool = unsupported(False, "start Python under numactl")
    numa_bind_nodes: list[int] | None = unsupported(None, "start Python under numactl", also=([],))
    numa_bind_cpus: list[str] | None = unsupported(None, "start Python under numactl", also=([],))
    max_parallel_loading_workers: int | None = unsupported(None, _ONE_ENGINE)
    worker_cls: Any = unsupported("auto", _ONE_ENGINE)
    worker_extension_cls: str = unsupported("", _ONE_ENGINE)
    ray_workers_use_nsight: bool = unsupported(False, _ONE_ENGINE)
    enable_shm_tensor_arena: bool = unsupported(False, _ONE_ENGINE)
    enable_batch_sharded_sampling: bool | None = unsupported(None, "see tensor_parallel_size", also=(False,))
    fault_tolerance_config: Any = unsupported(None, _ONE_ENGINE, also=({},))
    enable_fault_tolerance: bool = unsupported(False, _ONE_ENGINE)

    # Experts
    enable_ep_weight_filter: bool = unsupported(False, _EXPERTS)
    enable_elastic_ep: bool = unsupported(False, _EXPERTS)
    elastic_ep_max_dp_size: int | None = unsupported(None, _EXPERTS)
    enable_eplb: bool = unsupported(False, _EXPERTS)
    eplb_config: Any = unsupported(None, _EXPERTS, also=({},))
    expert_placement_strategy: str = unsupported("linear", _EXPERTS)
    all2all_backend: str = unsupported("allgather_reducescatter", _EXPERTS)
    moe_backend: str = unsupported("auto", _KERNELS)
    enable_hc_sp: bool = unsupported(False, _EXPERTS)
    enable_dbo: bool = unsupported(False, _EXPERTS)
    ubatch_size: int = unsupported(0, _EXPERTS)
    dbo_decode_token_threshold: int = unsupported(32, _EXPERTS)
    dbo_prefill_token_threshold: int = unsupported(512, _EXPERTS)

    # Compilation and kernels
    compilation_config: Any = unsupported(None, _GRAPHS, also=({},), aliases=("-cc",))
    max_cudagraph_capture_size: int | None = unsupported(None, "see cudagraph_capture_sizes")
    optimization_level: int = unsupported(2, _GRAPHS, aliases=("-O",))
    performance_mode: str = unsupported("balanced", "see max_num_batched_tokens and max_num_seqs")
    kernel_config: Any = unsupported(None, _KERNELS, also=({},))
    ir_op_priority: Any = unsupported(None, _KERNELS, also=({},))
    attention_backend: str | None = unsupported(None, "use attention_config={'backend': ...}")
    sparse_indexer_topk_backend: str = unsupported("auto", _KERNELS)
    gdn_prefill_backend: str | None = unsupported(None, _RECURRENT)
    kda_prefill_backend: str | None = unsupported(None, _RECURRENT)
    kda_decode_backend: str | None = unsupported(None, _RECURRENT)
    enable_flashinfer_autotune: bool | None = unsupported(None, _KERNELS, also=(False,))
    disable_cascade_attn: bool | None = unsupported(None, _KERNELS, also=(True,))
    jit_monitor_mode: str = unsupported("warn", "programs that steps wait for are logged, never an error")
    jit_monitor_verbose: bool = unsupported(False, _LOGS)

    # The KV cache and other device memory
    prefix_caching_hash_algo: str = unsupported("sha256", "blocks are hashed with SHA-256")
    prefix_cache_retention_interval: int | None = unsupported(0, _RECURRENT, also=(None,))
    prefix_match_unit: int | None = unsupported(None, "prefixes are matched by whole blocks; see block_size")
    calculate_kv_scales: bool = unsupported(False, "an fp8 KV cache has no scales; see kv_cache_dtype")
    kv_cache_dtype_skip_layers: list[str] = unsupported([], "all layers have one kv_cache_dtype")
    kv_sharing_fast_prefill: bool = unsupported(False, "every layer computes all tokens of a prompt")
    swa_bounded_replay: bool = unsupported(True, "a prefix hit needs the blocks that windows read", also=(False,))
    disable_hybrid_kv_cache_manager: bool | None = unsupported(
        None, "cache groups follow from the model, and layers with a window keep no more than it", also=(False,)
    )
    mamba_config: Any = unsupported(None, _RECURRENT, also=({},))
    mamba_backend: str = unsupported("triton", _RECURRENT)
    mamba_ssu_algorithm: str | None = unsupported(None, _RECURRENT)
    mamba_cache_dtype: str = unsupported("auto", _RECURRENT)
    mamba_ssm_cache_dtype: str = unsupported("auto", _RECURRENT)
    mamba_cache_mode: str = unsupported("none", _RECURRENT)
    mamba_block_size: int | None = unsupported(None, _RECURRENT)
    mamba_cache_philox_rounds: int = unsupported(0, _RECURRENT)
    enable_mamba_cache_stochastic_rounding: bool = unsupported(False, _RECURRENT)
    enable_mamba_shared_prefix_checkpoint: bool = unsupported(False, _RECURRENT)
    use_replayssm: bool = unsupported(False, _RECURRENT)
    replayssm_buffer_len: int = unsupported(16, _RECURRENT)
    offload_backend: str = unsupported("auto", _OFFLOAD)
    cpu_offload_gb: float = unsupported(0, _OFFLOAD, also=(0.0,))
    cpu_offload_params: Any = unsupported(None, _OFFLOAD, also=(set(), []))
    offload_group_size: int = unsupported(0, _OFFLOAD)
    offload_num_in_group: int = unsupported(1, _OFFLOAD)
    offload_prefetch_step: int = unsupported(1, _OFFLOAD)
    offload_params: Any = unsupported(None, _OFFLOAD, also=(set(), []))
    sleep_mode_offload_cudagraph: bool = unsupported(False, _SLEEP)
    sleep_preserve_parameter_names: list[str] = unsupported([], _SLEEP)
    enable_cumem_allocator: bool = unsupported(False, "JAX allocates; see gpu_memory_utilization")
    enable_nccl_comm_suspend: bool = unsupported(False, _SLEEP)

    # Scheduling
    max_num_partial_prefills: int = unsupported(1, "see long_prefill_token_threshold")
    max_long_partial_prefills: int = unsupported(1, "see long_prefill_token_threshold")
    long_prefill_token_threshold_adaptive: bool = unsupported(False, "see long_prefill_token_threshold")
    max_num_scheduled_tokens: int | None = unsupported(None, "see max_num_batched_tokens")
    max_num_active_seqs: int | None = unsupported(None, "see max_num_seqs")
    max_num_queued_reqs: int | None = unsupported(None, _QUEUE)
    max_num_queued_tokens: int | None = unsupported(None, _QUEUE)
    max_ttft_ms: float | None = unsupported(None, _QUEUE)
    prefill_schedule_interval: int = unsupported(1, _ONE_ENGINE)
    watermark: float = unsupported(0, "a request starts when its first blocks are free", also=(0.0,))
    scheduler_reserve_full_isl: bool | None = unsupported(True, "see watermark", also=(None, False))

    # Adapters and drafts
    max_lora_cls_labels: int | None = unsupported(None, _ADAPTERS)
    lora_target_modules: list[str] | None = unsupported(None, _ADAPTERS, also=([],))
    default_mm_loras: dict[str, str] | None = unsupported(None, _ADAPTERS, also=({},))
    fully_sharded_loras: bool = unsupported(False, _ADAPTERS)
    enable_tower_connector_lora: bool = unsupported(False, _ADAPTERS)
    specialize_active_lora: bool = unsupported(False, _ADAPTERS)
    enable_mixed_moe_lora_format: bool = unsupported(False, _ADAPTERS)
    enable_moe_shared_loras: bool = unsupported(False, _ADAPTERS)
    per_request_spec_decode_metrics: str = unsupported("none", _DRAFTS)

    # Metrics and logs
    collect_detailed_traces: Any = unsupported(None, "a request is one span; for the steps see start_profile()")
    show_hidden_metrics_for_version: str | None = unsupported(None, _MEASURED)
    custom_histogram_buckets: dict[str, list[float]] | None = unsupported(None, _MEASURED)
    cudagraph_metrics: bool = unsupported(False, _GRAPHS)
    enable_layerwise_nvtx_tracing: bool = unsupported(False, _MEASURED)
    enable_mfu_metrics: bool = unsupported(False, _MEASURED)
    enable_logging_iteration_details: bool = unsupported(False, _LOGS)
    aggregate_engine_logging: bool = unsupported(False, _LOGS)
    enable_log_requests: bool = unsupported(False, "see AsyncEngineArgs")
    logging_config: Any = unsupported(None, _LOGS)
    log_level: Any = unsupported(None, _LOGS)
    log_config_file: str | None = unsupported(None, "see AsyncEngineArgs; here, Python's logging module")
    max_log_len: int | None = unsupported(None, "see AsyncEngineArgs")

    # Other engines, and the server
    kv_transfer_config: Any = unsupported(None, _TRANSFER)
    kv_events_config: Any = unsupported(None, _TRANSFER)
    weight_transfer_config: Any = unsupported(None, _TRANSFER)
    tokens_only: bool = unsupported(False, "see skip_tokenizer_init")
    io_processor_plugin: str | None = unsupported(None, _SERVER)
    renderer_num_workers: int = unsupported(1, _SERVER)
    shutdown_timeout: int = unsupported(0, "see AsyncEngineArgs and `jaxllm serve`")
    fail_on_environ_validation: bool = unsupported(False, "no environment variable of vLLM is read")
    additional_config: Any = unsupported(None, "no platform takes any", also=({},))

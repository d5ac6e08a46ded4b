"""vLLM 0.32 has these metrics: those that jaxllm has too, and the others with the reason why not."""

from __future__ import annotations

from typing import NamedTuple

MODEL_AND_ENGINE = ("model_name", "engine")


class Family(NamedTuple):
    """The metrics of one name: their type, their labels, and the values of the last label if they are fixed."""

    type: str
    labels: tuple[str, ...] = MODEL_AND_ENGINE
    values: str = ""


def family(kind: str, label: str, values: str) -> Family:
    return Family(kind, (*MODEL_AND_ENGINE, label), values)


CACHE_CONFIG_LABELS = (
    *("block_size", "cache_dtype", "enable_prefix_caching", "engine", "gpu_memory_utilization"),
    *("kv_cache_max_concurrency", "kv_cache_memory_bytes", "kv_cache_size_tokens", "num_gpu_blocks"),
    *("num_gpu_blocks_override", "prefix_caching_hash_algo"),
)
"""Labels of the cache's settings; vLLM has more, which have no meaning here."""

OURS = {
    "num_requests_running": Family("Gauge"),
    "num_requests_waiting": Family("Gauge"),
    "num_requests_waiting_by_reason": family("Gauge", "reason", "capacity deferred"),
    "engine_is_warm": Family("Gauge"),  # vLLM, which compiles before it starts, has no such thing
    "programs_compiled": Family("Counter"),  # nor this
    "engine_sleep_state": family("Gauge", "sleep_state", "awake weights_offloaded discard_all"),
    "kv_cache_usage_perc": Family("Gauge"),
    "cache_config_info": Family("Gauge", CACHE_CONFIG_LABELS),
    "prefix_cache_queries": Family("Counter"),
    "prefix_cache_hits": Family("Counter"),
    "external_prefix_cache_queries": Family("Counter"),
    "external_prefix_cache_hits": Family("Counter"),
    "mm_cache_queries": Family("Counter"),
    "mm_cache_hits": Family("Counter"),
    "num_preemptions": Family("Counter"),
    "prompt_tokens": Family("Counter"),
    "prompt_tokens_by_source": family("Counter", "source", "local_compute local_cache_hit external_kv_transfer"),
    "prompt_tokens_cached": Family("Counter"),
    "prompt_tokens_cached_by_source": family("Counter", "source", "device host p2p disk external_unspecified"),
    "generation_tokens": Family("Counter"),
    "request_success": family("Counter", "finished_reason", "stop length abort error repetition"),
    "admission_rejections": Family(
        "Counter", ("model_name", "reason"), "max_num_queued_reqs max_num_queued_tokens max_ttft_ms"
    ),
    "request_prompt_tokens": Family("Histogram"),
    "request_generation_tokens": Family("Histogram"),
    "iteration_tokens_total": Family("Histogram"),
    "request_max_num_generation_tokens": Family("Histogram"),
    "request_params_n": Family("Histogram"),
    "request_params_max_tokens": Family("Histogram"),
    "time_to_first_token_seconds": Family("Histogram"),
    "inter_token_latency_seconds": Family("Histogram"),
    "request_time_per_output_token_seconds": Family("Histogram"),
    "e2e_request_latency_seconds": Family("Histogram"),
    "request_queue_time_seconds": Family("Histogram"),
    "request_inference_time_seconds": Family("Histogram"),
    "request_prefill_time_seconds": Family("Histogram"),
    "request_decode_time_seconds": Family("Histogram"),
    "request_num_preemptions": Family("Histogram"),
    "request_prefill_kv_computed_tokens": Family("Histogram"),
    # with speculative_config
    "spec_decode_num_drafts": Family("Counter"),
    "spec_decode_num_draft_tokens": Family("Counter"),
    "spec_decode_num_accepted_tokens": Family("Counter"),
    "spec_decode_num_accepted_tokens_per_pos": Family("Vector"),
    # with enable_lora
    "lora_requests_info": Family("Gauge", ("max_lora", "waiting_lora_adapters", "running_lora_adapters")),
    # with kv_offloading_size; vLLM's connector has others
    "kv_tier_blocks": family("Gauge", "tier", "host disk"),
    "kv_tier_bytes": family("Gauge", "tier", "host disk"),
    "kv_tier_fetched_blocks": family("Counter", "tier", "host disk"),
    "kv_tier_evicted_blocks": family("Counter", "tier", "host disk"),
    "kv_tier_fetches": family("Counter", "outcome", "done failed refused"),
    "kv_tier_broken_files": Family("Counter"),
    # with kv_cache_metrics
    "kv_block_lifetime_seconds": Family("Histogram"),
    "kv_block_idle_before_evict_seconds": Family("Histogram"),
    "kv_block_reuse_gap_seconds": Family("Histogram"),
}

NOT_APPLICABLE = {
    "vLLM has it only with VLLM_COMPUTE_NANS_IN_LOGITS": "corrupted_requests",
    "vLLM has it only with watermark_config; there are no watermarks": "watermark_requests",
    "vLLM has them only for diffusion models": """
        diffusion_num_denoising_steps diffusion_num_canvas_positions diffusion_num_committed_tokens""",
    "vLLM has them only with enable_mfu_metrics; jaxllm check says what bounds a step": """
        estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total""",
    "vLLM has it only where KV blocks come from other machines": "num_requests_kv_fetch_by_stage",
    "they belong to one of vLLM's KV connectors; there are none": """
        hf3fs_load_duration_seconds hf3fs_num_failed_load hf3fs_num_failed_save hf3fs_save_duration_seconds
        hisparse_cache_hits hisparse_cache_misses hisparse_host_block_idle_before_evict_seconds
        hisparse_host_block_lifetime_seconds hisparse_host_block_reuse_gap_seconds hisparse_host_cache_usage_perc
        hisparse_host_to_device_bytes hisparse_pending_page_transfers
        mooncake_store_operation_bytes_total mooncake_store_operation_failed_keys_total
        mooncake_store_operation_keys_total mooncake_store_operation_time_seconds mooncake_store_operation_total
        nixl_bytes_transferred nixl_num_descriptors nixl_num_failed_notifications nixl_num_failed_transfers
        nixl_num_kv_expired_reqs nixl_num_notifications_after_expiry nixl_post_time_seconds nixl_xfer_time_seconds""",
    "they are about parts of vLLM's offloading connectors; jaxllm has kv_tier_*": """
        kv_offload_allocation_failure kv_offload_cpu_allocation_size kv_offload_cpu_cache_read_usage_perc
        kv_offload_cpu_cache_usage_perc kv_offload_cpu_cache_write_usage_perc kv_offload_load_bytes
        kv_offload_load_size kv_offload_load_time kv_offload_lookup_async_delay_seconds
        kv_offload_lookup_sync_delay_seconds kv_offload_size kv_offload_store_bytes kv_offload_store_size
        kv_offload_store_time kv_offload_stores_skipped kv_offload_tiering_active_cascade_jobs
        kv_offload_tiering_active_promotion_jobs kv_offload_tiering_backpressure_blocks_dropped
        kv_offload_tiering_backpressure_store_latency_ema kv_offload_tiering_backpressure_stores_dropped
        kv_offload_tiering_cascade_job_failures kv_offload_tiering_chunk_hits kv_offload_tiering_chunk_queries
        kv_offload_tiering_lookup_async_delay_seconds kv_offload_tiering_lookup_sync_delay_seconds
        kv_offload_tiering_primary_read_usage_perc kv_offload_tiering_primary_write_usage_perc
        kv_offload_tiering_promotion_allocation_failures kv_offload_tiering_promotion_job_failures
        kv_offload_tiering_read_bytes kv_offload_tiering_read_time kv_offload_tiering_write_bytes
        kv_offload_tiering_write_time kv_offload_total_bytes kv_offload_total_time
        simple_kv_offload_info simple_kv_offload_load_blocks_total simple_kv_offload_pending_store_blocks
        simple_kv_offload_save_outcomes_total simple_kv_offload_used_blocks""",
    "they belong to vLLM's server; there is none yet": """
        rl_weight_update_operation_duration_seconds rl_weight_update_operations_in_flight
        sleep_mode_operation_duration_seconds sleep_mode_operations_in_flight tool_call_parser_invocations_total
        websocket_connection_duration_seconds websocket_connections_active websocket_connections_total""",
}
"""Names by the reason why there is no such metric here."""

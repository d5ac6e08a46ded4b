"""The public methods of vLLM 0.32's `LLM` and `LLMEngine`."""

_words = str.split

LLM_METHODS = _words(
    """
    apply_model beam_search chat classify collective_rpc embed encode enqueue enqueue_chat finish_weight_update
    from_engine_args generate get_default_sampling_params get_metrics get_tokenizer get_weight_version get_world_size
    init_weight_transfer_engine release_kv_cache_memory reset_mm_cache reset_prefix_cache score
    shutdown_weight_transfer_engine sleep start_draft_weight_update start_profile start_weight_update stop_profile
    update_weight_version update_weights wait_for_completion wake_up
    """
)
ENGINE_METHODS = _words(
    """
    abort_request add_lora add_request apply_model collective_rpc do_log_stats do_log_stats_with_interval
    from_engine_args from_vllm_config get_metrics get_num_unfinished_requests get_supported_tasks get_tokenizer
    get_weight_version has_unfinished_requests has_unfinished_requests_dp is_sleeping list_loras pin_lora
    release_kv_cache_memory remove_lora reset_encoder_cache reset_mm_cache reset_prefix_cache set_weight_version sleep
    start_profile step stop_profile wake_up
    """
)

"""Engine arguments: each name works or is refused by name, before any file is touched."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config.arguments import GONE
from jaxllm.config.groups import AttentionConfig, ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.kinds import Unsupported
from jaxllm.config.speculative import SpeculativeConfig
from jaxllm.exceptions import UnknownParameterError, VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.utils.argparse_utils import FlexibleArgumentParser

UNSUPPORTED = {
    field.name: field.metadata["kind"]
    for field in dataclasses.fields(EngineArgs)
    if isinstance(field.metadata["kind"], Unsupported)
}
VLLM_ARGUMENTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "vllm_0_32_engine_args.json").read_text(encoding="utf-8")
)
"""Every argument of vLLM 0.32's EngineArgs and AsyncEngineArgs with its default there; {} is an object of settings."""

BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "enable_lora": ("yes", 1, None),
    "enable_expert_parallel": ("yes", 1, None),
    "max_loras": (0, 1.5, "many", None),
    "max_lora_rank": (0, 12, "16", None),
    "max_cpu_loras": (0, "many"),
    "lora_dtype": ("float16", None),
    "model": (None, "", 3, "x" * 100_000),
    "tokenizer": ("", 3),
    "tokenizer_mode": ("slow", "deepseek_v32", None, 3),
    "served_model_name": ("", 3, {"a": 1}, [""], [3], ["n"] * 65),
    "skip_tokenizer_init": (1, None, "yes"),
    "dtype": ("int8", "fp8", 3, None, np.int8),
    "seed": (-1, 2**64, 1.0, None, True, "x"),
    "max_model_len": (0, -2, 2**31, 2**63, 1.5, "x", "1.5", True, math.nan),
    "runner": ("draft", "embed", None, 3, []),
    "convert": ("reward", None, True),
    "pooler_config": (
        *("MEAN", 3, [1], {"pooling": "MEAN"}, {"normalize": True}, {"pooling_type": "MAX"}, {"pooling_type": []}),
        *({"seq_pooling_type": "ALL"}, {"tok_pooling_type": "LAST"}, {"seq_pooling_type": 3}, {"task": "score"}),
        *({"task": "encode"}, {"task": 3}, {"task": "plugin"}, {"use_activation": 1}, {"dimensions": 0}),
        *({"pooling_type": "MEAN", "seq_pooling_type": "LAST"}, {"pooling_type": "STEP", "seq_pooling_type": "CLS"}),
        *({"enable_chunked_processing": True}, {"enable_chunked_processing": 0}, {"max_embed_len": 512}),
        *({"logit_mean": "0"}, {"logit_sigma": 0}, {"logit_sigma": math.nan}, {"logit_scale": 0.0}),
        *({"logit_bias": 1.0, "logit_mean": 1.0}, {"logit_scale": 1.0, "logit_sigma": 1.0}, {"step_tag_id": -1}),
        *({"returned_token_ids": 3}, {"returned_token_ids": [-1]}, {"returned_token_ids": ["a"]}),
        {"enable_flash_late_interaction": None},
    ),
    "revision": ("",),
    "tokenizer_revision": ("",),
    "hf_token": ("", 3),
    "hf_overrides": (3, "x", [1], lambda config: config),
    "chat_template": ("", 3),
    "generation_config": ("", None),
    "override_generation_config": (3, "x"),
    "quantization": ("aqlm", "INT4", "INT8", 8, True, ["int8"]),
    "max_logprobs": (-2, 2**31, 1.0, None),
    "enforce_eager": (1, None),
    "enable_sleep_mode": (1, None),
    "load_format": ("npcache", "tensorizer", None),
    "download_dir": ("", 3),
    "safetensors_load_strategy": ("eager", "torchao", 3),
    "safetensors_prefetch_num_threads": (0, 65, None),
    "safetensors_prefetch_block_size": (0, 2**31, None),
    "model_loader_extra_config": (
        *(3, {"pattern": "x"}, {"num_threads": 0}, {"num_threads": "8"}, {"enable_multithread_load": 1}),
        {"enable_weights_track": True},
    ),
    "use_tqdm_on_load": (1, None),
    "disable_custom_all_reduce": (1, None),
    "tensor_parallel_size": (0, -1, 2**31, 1.0, "x", True, None),
    "mesh": (3, "x", [1]),
    "data_parallel_size": (0, -1, 1025, 1.0, "x", True, None),
    "data_parallel_backend": ("rays", None, 1),
    "distributed_executor_backend": ("external_launcher", "rays", 1),
    "nnodes": (-1, 4097, 2.0, "x", True, None),
    "node_rank": (-1, 4096, 1.0, "x", True, None),
    "master_addr": ("", 3, None),
    "master_port": (0, 65536, 1.0, "x", True, None),
    "block_size": (0, 4, 24, 1024, 16.0, "x", True),
    "gpu_memory_utilization": (0, 0.0, 1.1, -1, math.nan, math.inf, "0.9", None, True),
    "kv_cache_memory_bytes": (0, -1, 2**63, 1.5, "x"),
    "num_gpu_blocks_override": (0, 1, 2**31, 1.5),
    "kv_cache_dtype": ("int8", None, 3, "float8_e4m3fn"),
    "attention_config": ("xla", 3, {"backend": "FLASH_ATTN"}, {"backend": 3}, {"flash_attn_version": 3}),
    "linear_backend": ("xla", "cpu", None, 3),
    "selfcheck": (1, "yes", None),
    "kv_offloading_size": (0, 0.0, -1.0, math.nan, "x", True),
    "kv_offloading_backend": ("lmcache", "", None, 3),
    "kv_cache_folder": ("", 3),
    "kv_cache_folder_size": (0, 0.0, -1.0, math.nan, "x", None),
    "enable_prefix_caching": (1, "yes"),
    "max_num_batched_tokens": (0, -1, 2**31, 2**63, 1.5, "x"),
    "cudagraph_capture_sizes": (3, "1,2", [0], [1, -1], [1.5], [True], ["x"], {1: 2}, [2**31], [1] * 1025),
    "max_num_seqs": (0, -1, 2**31, 2**63, 1.5, "x"),
    "long_prefill_token_threshold": (-1, 2**31, 1.5, None),
    "itl_target_ms": (-1, math.nan, math.inf, "50", True),
    "enable_chunked_prefill": (1, "yes"),
    "scheduling_policy": ("lifo", None, 3, []),
    "scheduler_cls": ("NoModule", "", 3, "module."),
    "async_scheduling": (1, "yes"),
    "disable_log_stats": (1, None),
    "logprobs_mode": ("logprobs", None, 3, [], "raw"),
    "logits_processors": ("module:function", 3, {"a": 1}, [""], ["m:f"] * 65),
    "batch_invariant": (1, 0, "yes"),
    "steering": ("", 3, ["a"]),
    "hidden_states_layers": (3, "x", [1.5], [True], ["x"], [10_000]),
    "stream_interval": (0, -1, 2**31, 1.5, None, True),
    "kv_cache_metrics": (1, None),
    "kv_cache_metrics_sample": (0, 0.0, 1.1, -1, math.nan, "0.5", None, True),
    "otlp_traces_endpoint": (3, "", []),
    "profiler_config": (3, "torch", {"profiler": "cuda"}, {"profiler": "torch"}, {"folder": "x"}),
    "limit_mm_per_prompt": (3, "image", [1]),
    "mm_processor_kwargs": (3, "x", [1]),
    "mm_processor_cache_gb": (-1, math.nan, math.inf, "4", None, True),
    "media_io_kwargs": (3, "video", [1]),
    "allowed_local_media_path": (3, None, ["/"]),
    "allowed_media_domains": (3, [""], [3], ["n"] * 65),
    "interleave_mm_strings": (1, None, "yes"),
    "language_model_only": (1, None, "yes"),
    "enable_mm_embeds": (1, None, "yes"),
    "enable_prompt_embeds": (1, None, "yes"),
    "speculative_config": (
        *("ngram", 3, {}, {"method": "eagle3"}, {"model": 3}, {"method": "suffix", "model": "a/draft"}),
        *({"method": "draft_model"}, {"method": "draft_model", "model": "ngram"}, {"model": "a", "max_model_len": 0}),
        *({"model": "a", "tensor_parallel_size": "2"}, {"model": "a", "draft_load_config": {}}),
        *({"method": "suffix", "revision": "main"}, {"method": "ngram", "max_model_len": 5}),
        *({"method": "ngram", "num_speculative_tokens": 0}, {"method": "ngram", "num_speculative_tokens": 65}),
        *({"method": "ngram", "prompt_lookup_max": 0}, {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}),
        *({"method": "ngram", "quantization": "fp8"}, {"method": "ngram", "tokens": 3}),
    ),
    "spec_method": ("medusa", 3),
    "spec_model": ("", 3),
    "spec_tokens": (0, 65, 1.5, "x"),
    "structured_outputs_config": (
        *("guidance", 3, [1], {"backend": "regex"}, {"backend": 3}, {"backends": "auto"}),
        *({"disable_any_whitespace": 1}, {"reasoning_parser": "qwen3"}, {"reasoning_parser_plugin": "a.py"}),
    ),
    "reasoning_parser": ("loud", 3, None),
    "reasoning_config": (
        *("qwen3", 3, {}, {"reasoning_start_str": "<think>"}, {"reasoning_start_str": "", "reasoning_end_str": "b"}),
        *({"reasoning_start_str": 3, "reasoning_end_str": "b"}, {"reasoning_start_str": "a" * 5000}),
        *({"start": "a"}, {"reasoning_parser": "qwen3", "reasoning_start_str": "a", "reasoning_end_str": "b"}),
    ),
}


def make(**fields: Any) -> EngineArgs:
    return EngineArgs(**{"model": "no/such-model", **fields})


def test_defaults():
    args = make()
    assert (args.gpu_memory_utilization, args.dtype, args.seed, args.max_logprobs) == (0.9, "auto", 0, 20)
    assert (args.enable_prefix_caching, args.scheduling_policy, args.enforce_eager) == (None, "fcfs", False)
    assert (args.block_size, args.max_num_seqs, args.max_num_batched_tokens, args.max_model_len) == (None,) * 4


def test_tables_cover_every_argument():
    supported = {field.name for field in dataclasses.fields(EngineArgs)} - set(UNSUPPORTED)
    assert set(BAD_VALUES) == supported
    assert not supported & set(GONE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, values in BAD_VALUES.items()
        for i, value in enumerate(values)
    ],
)
def test_bad_values_name_their_argument(name: str, value: Any):
    with pytest.raises(VLLMValidationError) as caught:
        make(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 400


def test_every_argument_of_vllm_is_known_and_takes_its_default():
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(VLLM_ARGUMENTS) - known == set()
    args = EngineArgs(**VLLM_ARGUMENTS)
    assert {name: getattr(args, name) for name in set(VLLM_ARGUMENTS) & set(UNSUPPORTED)} == {
        name: VLLM_ARGUMENTS[name] for name in set(VLLM_ARGUMENTS) & set(UNSUPPORTED)
    }


def test_unsupported_arguments_are_refused_by_name():
    for name, kind in UNSUPPORTED.items():
        taken = (kind.only, *kind.also)
        for value in (True, False, 7, "refused", ["refused"], {"refused": 1}, np.zeros(2)):
            if any(type(value) is type(each) and value == each for each in taken):
                continue
            with pytest.raises(VLLMValidationError, match=f"^{name}=.* is not supported: .+ Leave {name} at") as caught:
                make(**{name: value})
            assert caught.value.parameter == name
        for value in taken:
            assert getattr(make(**{name: value}), name) == value


@pytest.mark.parametrize("name", GONE)
def test_gone_arguments_say_what_to_use(name: str):
    with pytest.raises(UnknownParameterError) as caught:
        make(**{name: 1})
    assert caught.value.parameter == name
    assert GONE[name] in str(caught.value)


def test_unknown_argument_is_a_type_error_with_a_suggestion():
    with pytest.raises(TypeError, match=r"'max_modle_len'.*'max_model_len'"):
        make(max_modle_len=3)


def test_unsupported_numbers_are_not_taken_for_booleans():
    with pytest.raises(VLLMValidationError, match="enable_lora"):
        make(enable_lora=0)
    with pytest.raises(VLLMValidationError, match="tensor_parallel_size"):
        make(tensor_parallel_size=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_model_len": "auto"}, -1),
        ({"max_model_len": "4K"}, 4096),
        ({"nnodes": "auto"}, 0),
        ({"max_num_batched_tokens": "25.6k"}, 25_600),
        ({"kv_cache_memory_bytes": "2G"}, 2 * 2**30),
        ({"dtype": np.float32}, "float32"),
        ({"dtype": np.dtype("float16")}, "float16"),
        ({"hf_overrides": None}, {}),
        ({"hf_overrides": '{"rope_theta": 5}'}, {"rope_theta": 5}),
        ({"max_num_seqs": np.int64(4)}, 4),
        ({"cudagraph_capture_sizes": (8, np.int64(64))}, [8, 64]),
        ({"cudagraph_capture_sizes": []}, None),
        ({"hf_token": True}, True),
        ({"served_model_name": "name"}, ["name"]),
        ({"logits_processors": (math.sqrt, "a:b")}, [math.sqrt, "a:b"]),
        ({"batch_invariant": None}, None),
        ({"quantization": "int8_per_channel_weight_only"}, "int8_per_channel_weight_only"),
        ({"structured_outputs_config": {"backend": "guidance"}}, StructuredOutputsConfig("guidance")),
        ({"structured_outputs_config": StructuredOutputsConfig()}, StructuredOutputsConfig()),
        ({"reasoning_config": {"reasoning_start_str": "a", "reasoning_end_str": "b"}}, ReasoningConfig("", "a", "b")),
    ],
)
def test_accepted_spellings(fields: dict[str, Any], expected: Any):
    (name,) = fields
    assert getattr(make(**fields), name) == expected


def test_more_requests_than_tokens_in_a_step():
    with pytest.raises(VLLMValidationError, match="max_num_seqs=32") as caught:
        make(max_num_batched_tokens=16, max_num_seqs=32)
    assert caught.value.parameter == "max_num_batched_tokens"


def test_the_token_is_not_shown():
    assert "hf_secret" not in repr(make(hf_token="hf_secret"))


def parse(*words: str) -> EngineArgs:
    parser = FlexibleArgumentParser(allow_abbrev=False, exit_on_error=False)
    return EngineArgs.from_cli_args(EngineArgs.add_cli_args(parser).parse_args(words))


def test_no_flags_give_the_defaults():
    assert parse("--model", "m") == EngineArgs(model="m")
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert EngineArgs(**vars(parser.parse_args(["--model", "m"]))) == EngineArgs(model="m")


def test_flags_as_vllms_users_write_them():
    words = ("--model", "m", "--max_model_len", "10.5k", "--structured_outputs_config.disable_any_whitespace", "true")
    expected = EngineArgs(
        "m", max_model_len=10_500, structured_outputs_config=StructuredOutputsConfig(disable_any_whitespace=True)
    )
    assert parse(*words) == expected
    assert parse("--model=m", "-ac.backend", "xla").attention_config == AttentionConfig("xla")


def test_every_argument_of_vllm_has_its_flag():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    flags = {flag for action in parser._actions for flag in action.option_strings}
    internal = {"enable_mm_processor_stats"}  # not a flag in vLLM either
    assert {"--" + name.replace("_", "-") for name in set(VLLM_ARGUMENTS) - internal} <= flags


def test_flags():
    args = parse(
        *("--model", "m", "--max-model-len", "8k", "--dtype", "bfloat16", "--seed", "3", "--no-enable-prefix-caching"),
        *("--enforce-eager", "--gpu-memory-utilization", "0.5", "--hf-overrides", '{"rope_theta": 5.0}'),
        *("--logits-processors", "a:b", "c:d", "--logprobs-mode", "raw_logits", "--batch-invariant"),
        *("--reasoning-config", '{"reasoning_start_str": "<", "reasoning_end_str": ">"}', "--stream-interval", "8"),
        *("--structured-outputs-config", '{"disable_any_whitespace": true}'),
        *(
            "--scheduling-policy",
            "priority",
            "--block-size",
            "32",
            "--kv-cache-memory-bytes",
            "1M",
            "-tp",
            "1",
            "-q",
            "int8",
        ),
    )
    assert args == EngineArgs(
        model="m",
        max_model_len=8000,
        dtype="bfloat16",
        seed=3,
        enable_prefix_caching=False,
        enforce_eager=True,
        gpu_memory_utilization=0.5,
        hf_overrides={"rope_theta": 5.0},
        scheduling_policy="priority",
        block_size=32,
        kv_cache_memory_bytes=2**20,
        logits_processors=["a:b", "c:d"],
        logprobs_mode="raw_logits",
        batch_invariant=True,
        reasoning_config=ReasoningConfig(reasoning_start_str="<", reasoning_end_str=">"),
        stream_interval=8,
        quantization="int8",
        structured_outputs_config=StructuredOutputsConfig(disable_any_whitespace=True),
    )


def test_flags_of_adapters_and_drafts():
    adapters = parse(
        "--model", "m", "--enable-lora", "--max-loras", "4", "--max-lora-rank", "64", "--max-cpu-loras", "8"
    )
    assert adapters == EngineArgs(model="m", enable_lora=True, max_loras=4, max_lora_rank=64, max_cpu_loras=8)
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6}
    drafts = parse("--model", "m", "-sc", json.dumps(config))
    assert drafts == EngineArgs(model="m", speculative_config=config)  # pyright: ignore[reportArgumentType]
    assert drafts.speculation() == SpeculativeConfig(**config)
    short = parse("--model", "m", "--spec-method", "suffix", "--spec-tokens", "7")
    assert short.speculation() == SpeculativeConfig(method="suffix", num_speculative_tokens=7)
    named = parse("--model", "m", "--spec-model", "a/draft")
    assert named.speculation() == SpeculativeConfig(model="a/draft")
    assert SpeculativeConfig(model="a/draft").settings(8.0).method == "draft_model"
    assert SpeculativeConfig("qwen3_5_mtp").settings(8.0) == SpeculativeConfig("mtp").settings(8.0)
    assert EngineArgs(model="m").speculation() is None


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"spec_method": "ngram", "speculative_config": {"method": "ngram"}}, "spec_method"),
        ({"spec_tokens": 3}, "speculative_config"),
        ({"spec_method": "draft_model"}, "speculative_config"),
        ({"spec_method": "suffix", "spec_model": "a/draft"}, "speculative_config"),
    ],
)
def test_short_arguments_of_drafts_go_together(arguments: dict[str, Any], name: str):
    with pytest.raises(VLLMValidationError, match=name) as caught:
        make(**arguments)
    assert caught.value.parameter == name


def test_where_drafts_are_looked_up():
    assert SpeculativeConfig("ngram").lookup == (2, 4)
    assert SpeculativeConfig("ngram", prompt_lookup_max=3).lookup == (3, 3)
    assert SpeculativeConfig("ngram", prompt_lookup_min=5).lookup == (5, 5)
    assert SpeculativeConfig(model="[ngram]", prompt_lookup_min=1, prompt_lookup_max=3).lookup == (1, 3)
    assert SpeculativeConfig("suffix").settings(8.0).num_speculative_tokens == 24


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--pipeline-parallel-size", "2"), "pipeline_parallel_size"),
        (("-pp", "2"), "pipeline_parallel_size"),
        (("-dp", "0"), "data_parallel_size"),
        (("-tp", "0"), "tensor_parallel_size"),
        (("--quantization", "aqlm"), "quantization"),
        (("--max-lora-rank", "12"), "max_lora_rank"),
        (("--speculative-config", '{"method": "medusa"}'), "speculative_config"),
        (("-sc", '{"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}'), "speculative_config"),
        (("--block-size", "24"), "block_size"),
        (("--reasoning-parser", "loud"), "reasoning_parser"),
        (("--logprobs-mode", "all"), "logprobs_mode"),
        (("--cudagraph-capture-sizes", "1", "0"), "cudagraph_capture_sizes"),
        (("--max-cudagraph-capture-size", "8"), "max_cudagraph_capture_size"),
        (("--no-disable-cascade-attn",), "disable_cascade_attn"),
        (("-O3",), "optimization_level"),
        (("-O", "0"), "optimization_level"),
        (("-cc", '{"mode": 3}'), "compilation_config"),
    ],
)
def test_flags_are_refused_by_name(words: tuple[str, ...], name: str):
    with pytest.raises(VLLMValidationError, match=f"^{name}") as caught:
        parse("--model", "m", *words)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    "words",
    [
        ("--max-model-len", "many"),
        ("--max-model-len", "1.5K"),
        ("--hf-overrides", "[1]"),
        ("--hf-overrides", "{"),
        ("--seed", "x"),
    ],
)
def test_malformed_flags(words: tuple[str, str]):
    with pytest.raises(argparse.ArgumentError, match=words[0]):
        parse("--model", "m", *words)

"""The settings of an engine under vLLM's names: what programs read of llm_engine.vllm_config and model_config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxllm.config import ProfilerConfig, ReasoningConfig, StructuredOutputsConfig
from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.llm import LLM
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.vllm_config import VllmConfig, vllm_config
from tests.config.test_engine_config import LLAMA
from tests.engine.fake_core import FakeCore
from tests.engine.support import make_ready


def test_settings_under_vllms_names(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    overrides = {"rope_theta": 5.0, "pad_token_id": 7}
    args = EngineArgs(model=str(tmp_path), load_format="dummy", hf_overrides=overrides, kv_cache_dtype="fp8")
    config = vllm_config(args.create_engine_config(), num_blocks=101, max_model_len=96)
    ready = msgspec.structs.replace(make_ready(), vllm_config=config)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=EngineReady) == ready
    engine = LLMEngine(InprocClient(FakeCore(lambda request: [])), FrontEnd(ready, None, None))
    llm = LLM.__new__(LLM)
    llm.llm_engine = engine
    model_config = llm.model_config
    assert engine.vllm_config is config
    assert engine.max_model_len == 96
    assert model_config is engine.model_config is config.model_config
    assert (model_config.model, model_config.tokenizer) == (str(tmp_path), str(tmp_path))
    assert (model_config.max_model_len, model_config.dtype, model_config.max_logprobs) == (96, "bfloat16", 20)
    sizes = (model_config.get_vocab_size(), model_config.get_hidden_size(), model_config.get_head_size())
    assert (*sizes, model_config.get_total_num_kv_heads()) == (64, 32, 8, 2)
    assert model_config.hf_config.pad_token_id == 7
    assert type(model_config.hf_config).__name__ == "LlamaConfig"
    assert model_config.hf_config is model_config.hf_config
    assert model_config.hf_text_config.hidden_size == 32
    assert model_config.architectures == ["LlamaForCausalLM"]
    cache, scheduler = config.cache_config, config.scheduler_config
    assert (cache.block_size, cache.cache_dtype, cache.num_gpu_blocks) == (128, "float8_e4m3fn", 101)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.policy) == (256, 512, "fcfs")
    assert (scheduler.max_model_len, config.parallel_config.world_size) == (96, 1)
    assert (config.device_config.device_type, config.attention_config.backend) == ("cpu", "xla")
    assert (scheduler.async_scheduling, model_config.batch_invariant, model_config.quantization) == (True, True, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model_config.max_model_len = 3  # type: ignore[misc]
    engine.shutdown()


GEMMA3_TEXT = LLAMA | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "query_pre_attn_scalar": 8,
    "rope_local_base_freq": 10_000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    "gemma3": GEMMA3_TEXT,
    "multimodal": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": GEMMA3_TEXT,
        "vision_config": {"hidden_size": 24},
        "mm_tokens_per_image": 49,
    },
    "nothing that transformers knows": LLAMA | {"model_type": "none-such"},
    "what only JSON holds": LLAMA | {"x": [1e400, -1e400, 2**70, -(2**70), "\ud800", {"a": [None, True, {}]}, 0.1]},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_cross_a_process_boundary(case: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[case]))
    args = EngineArgs(
        model=str(tmp_path),
        load_format="dummy",
        quantization="int8",
        cudagraph_capture_sizes=[8, 64],
        structured_outputs_config=StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True),
        reasoning_config=ReasoningConfig(reasoning_start_str="<think>", reasoning_end_str="</think>"),
        profiler_config=ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path), delay_iterations=3),
        kv_cache_memory_bytes=2**40,
        seed=2**64 - 1,
    )
    config = vllm_config(args.create_engine_config(), num_blocks=7, max_model_len=96)
    assert config.model_config.hf_config  # a settled property does not cross
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=VllmConfig)
    assert copy == config
    ours, theirs = config.model_config.hf_config, copy.model_config.hf_config
    assert (type(ours), ours.to_dict()) == (type(theirs), theirs.to_dict())
    assert getattr(theirs, "x", None) == CONFIGS[case].get("x")
    assert json.loads(copy.model_config.hf_config_json) == CONFIGS[case]

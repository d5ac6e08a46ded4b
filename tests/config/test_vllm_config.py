"""The settings of an engine under vLLM's names: what programs read of llm_engine.vllm_config and model_config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxllm.config import EngineArgs
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.llm import LLM
from tests.config.test_engine_config import LLAMA
from tests.engine.fake_core import FakeCore


def test_settings_under_vllms_names(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    overrides = {"rope_theta": 5.0, "pad_token_id": 7}
    args = EngineArgs(model=str(tmp_path), load_format="dummy", hf_overrides=overrides, kv_cache_dtype="fp8")
    engine = LLMEngine(args.create_engine_config(), FakeCore(lambda request: [], max_model_len=96), None)
    llm = LLM.__new__(LLM)
    llm.llm_engine = engine
    vllm_config, model_config = engine.vllm_config, llm.model_config
    assert model_config is engine.model_config is vllm_config.model_config
    assert (model_config.model, model_config.tokenizer) == (str(tmp_path), str(tmp_path))
    assert (model_config.max_model_len, model_config.dtype, model_config.max_logprobs) == (96, "bfloat16", 20)
    sizes = (model_config.get_vocab_size(), model_config.get_hidden_size(), model_config.get_head_size())
    assert (*sizes, model_config.get_total_num_kv_heads()) == (64, 32, 8, 2)
    assert model_config.hf_config.pad_token_id == 7
    assert type(model_config.hf_config).__name__ == "LlamaConfig"
    assert model_config.hf_config is model_config.hf_config
    assert model_config.hf_text_config.hidden_size == 32
    assert model_config.architectures == ["LlamaForCausalLM"]
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    assert (cache.block_size, cache.cache_dtype, cache.num_gpu_blocks) == (128, "float8_e4m3fn", 101)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.policy) == (256, 512, "fcfs")
    assert (scheduler.max_model_len, vllm_config.parallel_config.world_size) == (96, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model_config.max_model_len = 3  # type: ignore[misc]
    engine.shutdown()

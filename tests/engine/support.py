"""Small tokenizers of the two large families, and engines over a fake core."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxllm.config.groups import AttentionConfig, StructuredOutputsConfig
from jaxllm.core_messages import SchedulerStats
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.engine.transport.wire import decode_from_core, encode_from_core
from jaxllm.llm import LLM
from jaxllm.resolve.vllm_config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import BytesClient, FakeCore

TEMPLATE = (
    "{%- for tool in tools or [] %}<|tool|>{{ tool.function.name }}\n{% endfor -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor -%}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{{ prefix or '' }}{% endif -%}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. END of the story, the END.",
    "hello world " * 9,
    "héllo wörld 你好",
]


def byte_level(bos: bool = False) -> Tokenizer:
    """Return a byte-level BPE, as GPT-2, Llama 3 and Qwen have. Ids below 300 are special tokens and bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials: list[str | AddedToken] = ["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE))


def byte_fallback() -> Tokenizer:
    """Return a BPE with byte tokens and a word-start mark, as Llama 2, Mistral and Gemma have."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    words = ["▁", *"abcdehlnorEND.", "he", "ll", "▁he", "EN", "héé", "你"]
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("E", "N")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"))


SETTINGS: dict[str, Any] = {
    "model": "fake",
    "served_model_name": "fake",
    "tokenizer": "fake",
    "revision": None,
    "tokenizer_revision": None,
    "skip_tokenizer_init": False,
    "dtype": "float32",
    "quantization": None,
    "seed": 0,
    "max_logprobs": 20,
    "logprobs_mode": "raw_logprobs",
    "enforce_eager": False,
    "batch_invariant": True,
    "architecture": "Fake",
    "vocab_size": 1000,
    "hidden_size": 32,
    "head_dim": 8,
    "num_kv_heads": 2,
    "hf_config_json": "{}",
    "block_size": 16,
    "gpu_memory_utilization": 0.9,
    "cache_dtype": "float32",
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": None,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "async_scheduling": True,
    "stream_interval": 1,
    "tensor_parallel_size": 3,
    "data_parallel_size": 1,
    "nnodes": 1,
    "device_type": "cpu",
    "backend": "xla",
    "disable_log_stats": False,
    "kv_cache_metrics": False,
    "kv_cache_metrics_sample": 0.01,
    "otlp_traces_endpoint": None,
    "structured_outputs_config": StructuredOutputsConfig(),
    "reasoning_config": None,
    "profiler_config": None,
    "generation_config": {},
    "default_sampling_params": {},
    "max_output_tokens": None,
    "chat_template": None,
    "extra_args": {},
    "has_logits_processors": False,
    "has_validators": False,
    "has_thinking_tokens": False,
}


def make_ready(*, max_model_len: int = 128, stats: SchedulerStats | None = None, **changes: Any) -> EngineReady:
    """Return the ready message of a core without a model, sent as a frame, with some settings changed."""
    assert set(changes) <= set(SETTINGS)
    stats = stats or FakeCore(lambda _: []).stats()
    values: dict[str, Any] = SETTINGS | {"max_model_len": max_model_len, "num_gpu_blocks": stats.num_blocks} | changes

    def pick(kind: Any, **groups: Any) -> Any:
        names = [field.name for field in dataclasses.fields(kind) if field.name in values]
        return kind(**groups, **{name: values[name] for name in names})

    groups = {
        "model_config": ModelConfig,
        "cache_config": CacheConfig,
        "scheduler_config": SchedulerConfig,
        "parallel_config": ParallelConfig,
        "device_config": DeviceConfig,
        "attention_config": AttentionConfig,
        "observability_config": ObservabilityConfig,
    }
    config = pick(VllmConfig, **{name: pick(kind) for name, kind in groups.items()})
    names = set(EngineReady.__struct_fields__) & set(values)
    ready = EngineReady(vllm_config=config, stats=stats, **{name: values[name] for name in names})
    received = decode_from_core(encode_from_core(ready))
    assert received == ready
    assert isinstance(received, EngineReady)
    return received


def make_engine(core: FakeCore, tokenizer: Tokenizer | None, **settings: Any) -> LLMEngine:
    ready = make_ready(max_model_len=core.max_model_len, stats=core.stats(), **settings)
    client = BytesClient(core)
    return LLMEngine(client, FrontEnd(ready, tokenizer, client.check))


def make_llm(core: FakeCore, tokenizer: Tokenizer | None, **settings: Any) -> LLM:
    llm = LLM.__new__(LLM)
    llm._start(make_engine(core, tokenizer, **settings))
    return llm

"""Tests get small tokenizers of the two large families here, and engines over a fake core."""

from __future__ import annotations

from typing import Any, cast

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxllm.config import EngineConfig
from jaxllm.config.groups import StructuredOutputsConfig
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.engine.core_client import CoreClient
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.llm import LLM
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import BytesClient

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


class FakeMesh:
    """Has as much of a mesh as the front half looks at."""

    size = 3


class ModelShape:
    """Has as much of a model's config as the front half looks at."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def make_config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = dict.fromkeys(EngineConfig.__dataclass_fields__)
    fields |= {
        "model": "fake",
        "model_config": ModelShape(1000),
        "mesh": FakeMesh(),
        "max_model_len": 128,
        "max_logprobs": 20,
        "seed": 0,
        "scheduling_policy": "fcfs",
        "generation_config": {},
        "default_sampling_params": {},
        "disable_log_stats": False,
        "kv_cache_metrics": False,
        "platform": "cpu",
        "skip_tokenizer_init": False,
        "logits_processors": (),
        "structured_outputs_config": StructuredOutputsConfig(),
        "stream_interval": 1,
    }
    return EngineConfig(**(fields | changes))


def make_engine(
    core: object, tokenizer: Tokenizer | None, grammars: GrammarCompiler | None = None, **config: Any
) -> LLMEngine:
    return LLMEngine(make_config(**config), BytesClient(cast(CoreClient, core)), tokenizer, grammars)


def make_llm(core: object, tokenizer: Tokenizer | None, **config: Any) -> LLM:
    llm = LLM.__new__(LLM)
    llm._start(make_engine(core, tokenizer, **config))
    return llm

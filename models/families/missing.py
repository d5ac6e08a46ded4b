"""Well-known architectures that no family reads, and what each needs that is not written yet."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_INDEXER = "sparse attention, in which an indexer with a cache of its own chooses each query's keys"
_CHANNELS = "Kimi delta attention, a recurrent state that decays by channel"
_STREAMS = "hyper-connections, which mix several residual streams"
_NEEDS = {
    f"{_INDEXER}, over blocks of keys": (*("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),),
    _STREAMS: ("HYV4ForCausalLM",),
    f"{_INDEXER}, beside recurrent layers, and {_STREAMS}": (
        *("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        *("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"),
    ),
    f"attention over compressed keys, an indexer, experts chosen by a hash, and {_STREAMS}": (
        *("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM"),
    ),
    f"{_CHANNELS}, beside gated attention over latents and attention over earlier layers": (
        "KimiK3ForConditionalGeneration",
    ),
    "the vision tower MoonViT around a text model of DeepSeek V3's shape": (
        *("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    ),
    "alternating updates of several streams (AltUp) and embeddings of each layer": (
        *("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    ),
    "an encoder of text, and attention to its outputs with learned biases by distance": (
        *("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"),
        *("T5EncoderModel", "T5Model", "T5Gemma2ForConditionalGeneration"),
    ),
    "the first DeBERTa's own projections of distances; DebertaV2Model and its classifiers run": (
        *("DebertaModel", "DebertaForSequenceClassification", "DebertaForTokenClassification"),
    ),
}
MISSING: Mapping[str, str] = MappingProxyType({name: need for need, names in _NEEDS.items() for name in names})
"""What is missing, in words that go on after "it needs", by architecture."""

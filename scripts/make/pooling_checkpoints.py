"""Write tests/data/pooling: a tiny random checkpoint per kind of pooling model, with goldens from HF Transformers.

Needs the environment of `tiny_checkpoints`: `python scripts/make.py pooling_checkpoints [CASE ...]`. Same
versions, same bytes.

Each case is a folder with what `save_pretrained` writes (bfloat16) and golden.npz, computed in float32 with eager
attention: tokens and token types of some texts, and HF's outputs for each: the last hidden states of all tokens, or
the scores of classes, for the text or for each token.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from make.tiny_checkpoints import SIZES, SMALL, VOCAB, Case, fill, run

LENGTHS = (1, 6, 40)
ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bert(model: str, **changes: Any) -> Case:
    """Return a case of a BERT."""
    return Case(model, lambda: transformers.BertConfig(**ENCODER | changes))


def roberta(model: str, config: str, **changes: Any) -> Case:
    """Return a case of a RoBERTa; its padding id differs from BERT's."""
    changes = {"pad_token_id": 3, "type_vocab_size": 1} | changes
    return Case(model, lambda: getattr(transformers, config)(**ENCODER | changes))


def modernbert(model: str, **changes: Any) -> Case:
    """Return a case of a ModernBERT: windows of 8 tokens to each side, and RoPE that differs."""
    ids = {"cls_token_id": 1, "sep_token_id": 2}
    sizes = ENCODER | ids | {"num_hidden_layers": 4, "local_attention": 16}
    return Case(model, lambda: transformers.ModernBertConfig(**sizes | changes))


def rotary(model: str, config: str, **changes: Any) -> Case:
    """Return a case of a BERT with RoPE."""
    sizes = {name: size for name, size in ENCODER.items() if name != "bos_token_id"}
    return Case(model, lambda: getattr(transformers, config)(**sizes | changes))


def deberta(model: str, **changes: Any) -> Case:
    """Return a case of a DeBERTa v3, with far distances that share rows."""
    kinds = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
    rows = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
    return Case(model, lambda: transformers.DebertaV2Config(**ENCODER | kinds | rows | changes))


def embedding_gemma() -> Any:
    """Return a config of EmbeddingGemma's: attention is not causal, and windows count both sides."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(
        **(SMALL | {"num_hidden_layers": 3, "sliding_window": 24, "query_pre_attn_scalar": 8}),
        layer_types=types,
        use_bidirectional_attention=True,
    )


def embedding_gemma2() -> Any:
    """Return a config of EmbeddingGemma 2's text model: windows to both sides, and wider heads in the last layer."""
    text = transformers.EmbeddingGemma2TextConfig(
        **ENCODER | {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256},
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=5,
        hidden_size_per_layer_input=8,
        embedding_dim=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    return transformers.EmbeddingGemma2Config(text_config=text, vision_config=None, audio_config=None)


NEW_NAMES = ("nomic_classifier", "gte_pairs", "jina_v3_classifier")
"""Cases with HF's present names of tensors; others have those of the first checkpoints, where they differ."""
CASES = {
    "bert": bert("BertModel"),
    "bert_pairs": bert("BertForSequenceClassification", num_labels=1),
    "bert_tokens": bert("BertForTokenClassification", num_labels=5, hidden_act="relu"),
    "roberta": roberta("RobertaModel", "RobertaConfig"),
    "xlm_roberta_classifier": roberta("XLMRobertaForSequenceClassification", "XLMRobertaConfig", num_labels=3),
    "modernbert": modernbert("ModernBertModel"),
    "modernbert_classifier": modernbert(
        "ModernBertForSequenceClassification",
        num_labels=3,
        classifier_pooling="mean",
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        classifier_bias=True,
    ),
    "modernbert_tokens": modernbert("ModernBertForTokenClassification", num_labels=4, num_hidden_layers=2),
    "nomic": rotary("NomicBertModel", "NomicBertConfig"),
    "nomic_classifier": rotary("NomicBertForSequenceClassification", "NomicBertConfig", num_labels=3),
    "gte": rotary("GteModel", "GteConfig", type_vocab_size=0),
    "gte_pairs": rotary(
        "GteForSequenceClassification",
        "GteConfig",
        num_labels=1,
        type_vocab_size=2,
        rope_parameters={"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.0},
    ),
    "jina_v3": rotary("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", type_vocab_size=1),
    "jina_v3_classifier": rotary("JinaEmbeddingsV3ForSequenceClassification", "JinaEmbeddingsV3Config", num_labels=3),
    "deberta": deberta("DebertaV2Model", position_buckets=-1),
    "deberta_pairs": deberta("DebertaV2ForSequenceClassification", num_labels=1, type_vocab_size=2),
    "deberta_tokens": deberta("DebertaV2ForTokenClassification", num_labels=4, num_hidden_layers=3),
    "embedding_gemma": Case("Gemma3TextModel", embedding_gemma),
    "embedding_gemma2": Case("EmbeddingGemma2Model", embedding_gemma2),
    "qwen3_embedder": Case("Qwen3Model", lambda: transformers.Qwen3Config(**SMALL)),
    "llama_classifier": Case("LlamaForSequenceClassification", lambda: transformers.LlamaConfig(**SMALL, num_labels=3)),
    "llama_tokens": Case("LlamaForTokenClassification", lambda: transformers.LlamaConfig(**SMALL, num_labels=4)),
    "qwen3_classifier": Case(
        "Qwen3ForSequenceClassification",
        lambda: transformers.Qwen3Config(**SMALL, num_labels=1, tie_word_embeddings=True),
    ),
    "gpt2_tokens": Case(
        "GPT2ForTokenClassification",
        lambda: transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            num_labels=3,
            **{name: SIZES[name] for name in SIZES if name.endswith("id")},
        ),
    ),
}


@torch.no_grad()
def golden(folder: Path, model_class: Any, *, has_types: bool) -> dict[str, Any]:
    """Run HF over the texts; the second half of each has type 1 if the model knows two."""
    rng = np.random.default_rng(0)
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    arrays: dict[str, Any] = {}
    for index, length in enumerate(LENGTHS):
        tokens = rng.integers(6, VOCAB, length)
        types = (np.arange(length) >= (length + 1) // 2) * int(has_types)
        type_ids = {"token_type_ids": torch.from_numpy(types)[None]} if has_types else {}
        out = model(input_ids=torch.from_numpy(tokens)[None], **type_ids)
        output = out.logits if hasattr(out, "logits") else out.last_hidden_state
        arrays |= {f"tokens_{index}": tokens.astype(np.int32), f"types_{index}": types.astype(np.int32)}
        arrays[f"output_{index}"] = output[0].numpy()
    return arrays


def make(name: str, case: Case, folder: Path) -> None:
    """Write one case."""
    model_class = getattr(transformers, case.model)
    shutil.rmtree(folder, ignore_errors=True)
    config = case.config()
    model = model_class(config)
    is_gemma, offset = "gemma" in name, float(name == "embedding_gemma")
    fill(model, 0, norm_offset=offset, scales_embeddings=is_gemma)
    model.to(torch.bfloat16).save_pretrained(folder, save_original_format=name not in NEW_NAMES)
    arrays = golden(folder, model_class, has_types=getattr(config, "type_vocab_size", 1) > 1)
    np.savez_compressed(folder / "golden.npz", **arrays)
    print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir()) // 1024} KB")


if __name__ == "__main__":
    run(__doc__, CASES, make, "pooling")

"""Write tests/data/embedding_gemma: tiny random EmbeddingGemma 1 and 2 in sentence-transformers' layout, with goldens.

Needs `pip install torch sentence-transformers==6.2.0`: `python scripts/make.py embedding_gemma_checkpoints [CASE ...]`.
Same versions, same bytes.

golden.npz has texts, and of each the tokens and sentence-transformers' embedding: without a prompt, and with those
named "query" and "document".
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from make.late_interaction_checkpoints import TEXTS, byte_pairs, drawn
from make.pooling_checkpoints import embedding_gemma, embedding_gemma2
from make.tiny_checkpoints import fill, run

PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


def first(num_tokens: int) -> Any:
    """Return an EmbeddingGemma."""
    config = embedding_gemma()
    config.vocab_size, config.max_position_embeddings = num_tokens, 256
    return transformers.Gemma3TextModel(config)


def second(num_tokens: int) -> Any:
    """Return the text model of an EmbeddingGemma 2."""
    config = embedding_gemma2().text_config
    config.vocab_size = num_tokens
    return transformers.EmbeddingGemma2TextModel(config)


@torch.no_grad()
def make(name: str, build: Callable[[int], Any], folder: Path) -> None:
    """Write one case."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = byte_pairs(folder, bos_token="<bos>", pad_token="<pad>", sep_token="<eos>")
    model = build(len(tokenizer))
    fill(model, 0, norm_offset=float(name == "first"), scales_embeddings=True)
    model.save_pretrained(folder)
    transformer = Transformer(str(folder), max_seq_length=100)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), "mean")]
    if name == "first":
        identity = {"bias": False, "activation_function": torch.nn.Identity()}
        modules += [Dense(32, 48, **identity), Dense(48, 32, **identity)]
        for seed, dense in enumerate(modules[2:]):
            dense.linear.weight.copy_(drawn(*dense.linear.weight.shape, seed=seed))
    modules.append(Normalize())
    SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save_pretrained(
        str(folder), create_model_card=False
    )
    loaded = SentenceTransformer(str(folder), device="cpu")
    arrays: dict[str, Any] = {"texts": np.frombuffer(json.dumps(TEXTS).encode(), np.uint8)}
    for prompt_name in (None, *PROMPTS):
        arrays[str(prompt_name)] = np.stack([loaded.encode(text, prompt_name=prompt_name) for text in TEXTS])
    np.savez_compressed(folder / "golden.npz", **arrays)
    print(f"{name}: {sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) // 1024} KB")


CASES = {"first": first, "second": second}

if __name__ == "__main__":
    run(__doc__, CASES, make, "embedding_gemma")

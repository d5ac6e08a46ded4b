"""Write tests/data/prompt_embeds: what HF Transformers generates after prompts of random embeddings.

Needs the environment of tiny_checkpoints, whose checkpoints it reads: `python scripts/make.py prompt_embeds_goldens`.
Same versions, same bytes.

Each case is a file with `embeds` [n, d], which HF gets as inputs_embeds, the greedy `tokens` after it and their
`logprobs` [tokens, v], and `ids` with the inputs_embeds that HF takes for the same, `embedded` [ids, d], all in float32
with eager attention.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

CASES = ("llama3_tied", "gemma2", "gemma3", "granite", "afmoe", "falcon_h1")
"""Models without factor for embeddings, with one in the embedding layer, and with one after it."""
LENGTH = 40
NUM_TOKENS = 8
MIN_GAP = 5e-3
"""Rounding could change a greedy choice as close as this; such a seed is not taken."""


def main() -> None:
    """Write all cases."""
    data = Path(__file__).parents[2] / "tests" / "data"
    (data / "prompt_embeds").mkdir(exist_ok=True)
    for case in CASES:
        with np.load(data / "tiny" / case / "golden.npz") as arrays:
            ids = arrays["prompt_1"].astype(np.int32)
        arrays = make(str(data / "tiny" / case), ids)
        np.savez_compressed(data / "prompt_embeds" / f"{case}.npz", **arrays)


@torch.no_grad()
def make(folder: str, ids: np.ndarray) -> dict[str, Any]:
    """Return the arrays of one case."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    embedded = embed(model, torch.tensor(ids.astype(np.int64)))
    for seed in range(100):
        drawn = torch.randn((LENGTH, embedded.shape[1]), generator=torch.Generator().manual_seed(seed))
        embeds = drawn * embedded.std()
        tokens, logprobs = decode(model, embeds)
        best = np.sort(logprobs, axis=-1)[:, -2:]
        if (best[:, 1] - best[:, 0]).min() > MIN_GAP:
            return {
                "embeds": embeds.numpy(),
                "tokens": np.array(tokens, np.int32),
                "logprobs": logprobs,
                "ids": ids,
                "embedded": embedded.numpy(),
            }
    raise RuntimeError(f"{folder}: no seed gives tokens that rounding cannot change")


def embed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return what HF computes as much of as of token ids: its embedding layer's output, or that and a factor."""
    expected, embedded = model(input_ids=ids[None]).logits, model.get_input_embeddings()(ids)
    for factor in (1.0, getattr(model.config, "embedding_multiplier", 1.0)):
        if torch.equal(model(inputs_embeds=embedded[None] * factor).logits, expected):
            return embedded * factor
    raise RuntimeError(f"{type(model).__name__} computes something else of inputs_embeds")


def decode(model: Any, embeds: torch.Tensor) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens, and the log-probabilities that they were taken from."""
    output = model(inputs_embeds=embeds[None], use_cache=True)
    tokens, rows = [], []
    for _ in range(NUM_TOKENS):
        row = output.logits[0, -1].log_softmax(-1)
        rows.append(row.numpy())
        tokens.append(int(row.argmax()))
        last = torch.tensor([[tokens[-1]]])
        output = model(input_ids=last, past_key_values=output.past_key_values, use_cache=True)
    return tokens, np.stack(rows).astype(np.float32)


if __name__ == "__main__":
    main()

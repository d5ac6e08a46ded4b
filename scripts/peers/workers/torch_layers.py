"""Run one op of some layers as HF Transformers computes it in torch: made once, then run for each line read.

    torch_layers.py delta '{"layers": 4, "sequences": 16, "tokens": 1, "heads": [16, 32], "dims": [128, 128]}'
    torch_layers.py latents '{"layers": 4, "sequences": 16, "tokens": 1, "length": 9, "heads": 16, "dims": [192, 128]}'
    torch_layers.py segments '{"layers": 1, "segments": 9, "tokens": 64, "heads": 12, "dims": 64, "dtype": "float32"}'

It prints "ready" once, then a line after each run. Data is random, in bfloat16 or the dtype that is named. The delta
rule is HF's function, which continues from a float32 state in a decode. HF attends over keys and values of all heads,
which it makes from the latents and caches; making them, and growing the cache, are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)


def make_delta(layers: int, sequences: int, tokens: int, heads: list[int], dims: list[int]) -> Callable[[], None]:
    """Return the delta rule of layers with numbers and dimensions of key and value heads."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    b, t = sequences, tokens
    query, key = (torch.rand(b, t, key_heads, key_dim).bfloat16() for _ in range(2))
    value = torch.rand(b, t, value_heads, value_dim).bfloat16()
    decay, beta = -torch.rand(b, t, value_heads), torch.rand(b, t, value_heads)
    states = [torch.rand(b, value_heads, key_dim, value_dim) for _ in range(layers if t == 1 else 0)]

    def run() -> None:
        settings: dict[str, Any] = {"g": decay, "beta": beta, "output_final_state": True}
        settings["use_qk_l2norm_in_kernel"] = True
        for layer in range(layers):
            if t > 1:
                torch_chunk_gated_delta_rule(query, key, value, **settings)
            else:
                rule = torch_recurrent_gated_delta_rule
                _, states[layer] = rule(query, key, value, initial_state=states[layer], **settings)

    return run


def make_latents(
    layers: int, sequences: int, tokens: int, length: int, heads: int, dims: list[int]
) -> Callable[[], None]:
    """Return the attention of layers over `length` tokens; the last ones are the queries."""
    key_dim, value_dim = dims
    query = torch.rand(sequences, heads, tokens, key_dim).bfloat16()
    cached = [
        [torch.rand(sequences, heads, length, dim).bfloat16() for dim in (key_dim, value_dim)] for _ in range(layers)
    ]
    seen = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    mask: dict[str, Any] = {} if tokens == 1 else {"is_causal": True} if tokens == length else {"attn_mask": seen}

    def run() -> None:
        for key, value in cached:
            torch.nn.functional.scaled_dot_product_attention(query, key, value, **mask)

    return run


def make_segments(layers: int, segments: int, tokens: int, heads: int, dims: int, dtype: str) -> Callable[[], None]:
    """Return the attention of layers over segments of equal length, within each."""
    kind = getattr(torch, dtype)
    inputs = [[torch.rand(segments, heads, tokens, dims).to(kind) for _ in range(3)] for _ in range(layers)]

    def run() -> None:
        for query, key, value in inputs:
            torch.nn.functional.scaled_dot_product_attention(query, key, value)

    return run


MAKERS = {"delta": make_delta, "latents": make_latents, "segments": make_segments}


def main() -> None:
    """Make, then run for each line."""
    op, sizes = sys.argv[1:]
    with torch.inference_mode():
        run = MAKERS[op](**json.loads(sizes))
        print("ready", flush=True)
        for _ in sys.stdin:
            run()
            print("done", flush=True)


if __name__ == "__main__":
    main()

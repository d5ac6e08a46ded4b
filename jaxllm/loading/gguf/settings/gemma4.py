"""Translate the GGUF metadata of Gemma 4, whose layers differ, into HF's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.settings.numbers import Numbers
from jaxllm.loading.gguf.settings.rope import ROPE_FACTORS_NAME, rope_factors

_NOT_ROTATED = 1e29
"""A frequency divisor from this on means that the dimension is not rotated."""


def gemma4_config(file: GGUFFile, numbers: Numbers, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Gemma 4's own keys; `config` holds the common keys, for the first layer where layers differ."""
    num_layers, pattern = config["num_hidden_layers"], "gemma4.attention.sliding_window_pattern"
    if not file.is_array(pattern) or len(file.array(pattern)) < num_layers:
        raise ValueError(f"the metadata key {pattern!r} does not hold a truth value for each layer")
    slides = [bool(each) for each in file.array(pattern)[:num_layers]]
    num_kv_heads = numbers.per_layer("attention.head_count_kv", num_layers)
    head_dim, sliding_head_dim = numbers.count("attention.key_length"), numbers.count("attention.key_length_swa")
    num_borrowers = numbers.whole("attention.shared_kv_layers", 0)
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": numbers.count("attention.sliding_window"),
        "head_dim": sliding_head_dim,
        "global_head_dim": head_dim,
        "per_layer_config": {
            str(layer): {"head_dim": sliding_head_dim if slides[layer] else head_dim, "num_key_value_heads": heads}
            for layer, heads in enumerate(num_kv_heads)
        },
        "attention_bias": False,
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in file.tensors
            for layer in range(num_layers - num_borrowers)
            if not slides[layer]
        ),
        "num_kv_shared_layers": num_borrowers,
        "use_double_wide_mlp": _doubles(numbers, num_layers, num_borrowers),
        "hidden_size_per_layer_input": numbers.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": numbers.number("final_logit_softcapping", None),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated(file),
                "rope_theta": config["rope_theta"],
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": numbers.number("rope.freq_base_swa", 10_000.0),
            },
        },
        **_expert_config(numbers),
    }


def _expert_config(numbers: Numbers) -> dict[str, Any]:
    if "expert_count" not in numbers:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": numbers.count("expert_count"),
        "top_k_experts": numbers.count("expert_used_count"),
        "moe_intermediate_size": numbers.count("expert_feed_forward_length"),
    }


def _doubles(numbers: Numbers, num_layers: int, num_borrowers: int) -> bool:
    """Return whether the last layers, which borrow keys and values, have MLPs twice as wide as the others."""
    widths = numbers.per_layer("feed_forward_length", num_layers)
    first = num_layers - num_borrowers
    alike, doubled = [widths[0]] * num_layers, [widths[0]] * first + [2 * widths[0]] * num_borrowers
    if widths not in (alike, doubled):
        raise ValueError(
            "the metadata key 'gemma4.feed_forward_length' differs between layers otherwise than HF's does"
        )
    return widths != alike


def _rotated(file: GGUFFile) -> float:
    """Return the rotated share of a global layer's head: the other frequencies are divided by a huge number."""
    if ROPE_FACTORS_NAME not in file.tensors:
        raise ValueError(f"the file has no {ROPE_FACTORS_NAME}, which says how much of a head is rotated")
    factors = rope_factors(file)
    rotated = factors < _NOT_ROTATED
    if not (factors[rotated] == 1).all() or not rotated[: rotated.sum()].all():
        raise ValueError(f"{ROPE_FACTORS_NAME} scales frequencies, which is not supported for Gemma 4")
    return float(rotated.mean())

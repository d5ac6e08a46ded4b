#!/usr/bin/env python3
"""Measure what prefix caching saves a hybrid: 256 questions behind one system prompt of 512 tokens, with and without.

The model is of Qwen3.5's kind, three layers of the gated delta rule to one of attention, small and of dummy weights: of
a prefix hit, a layer of attention finds its blocks and a layer with recurrent state a snapshot of it. The two engines
run in turns, and give the same tokens to the bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarking.prompts import FIRST_PLAIN_ID, Source
from machine import describe_sources, versions

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt

SYSTEM, QUESTION, ANSWER = 512, 32, 16
"""Lengths in tokens."""
VOCAB = 8192
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": VOCAB,
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 4096,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 64,
    "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    engines = {side: start(args.dtype, enable_prefix_caching=side == "with") for side in ("with", "without")}
    source, seconds, hits = Source(VOCAB), {side: list[float]() for side in engines}, list[int]()
    for _ in range(args.rounds):
        system = source.tokens(SYSTEM)
        prompts = [system + source.tokens(QUESTION) for _ in range(args.questions)]
        answers = []
        for side, llm in engines.items():
            begun = perf_counter()
            outputs = ask(llm, prompts)
            seconds[side].append(perf_counter() - begun)
            answers.append([output.outputs[0].token_ids for output in outputs])
            if side == "with":
                hits.append(sum(output.num_cached_tokens or 0 for output in outputs))
        if answers[0] != answers[1]:
            raise SystemExit("the outputs depend on what is in the prefix cache")
        print("  ".join(f"{side} {values[-1]:.2f} s" for side, values in seconds.items()), flush=True)
    medians = {side: round(statistics.median(values), 2) for side, values in seconds.items()}
    report = describe_sources() | {"versions": versions("jax", "jaxlib"), "dtype": args.dtype}
    report |= {"questions": args.questions, "prompt_tokens": args.questions * (SYSTEM + QUESTION)}
    report |= {"cached_tokens": hits, "seconds": seconds, "medians": medians}
    report |= {"times_faster": round(statistics.median(
        without / cached for cached, without in zip(seconds["with"], seconds["without"], strict=True)
    ), 2)}  # fmt: skip
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def start(dtype: str, *, enable_prefix_caching: bool) -> LLM:
    """Return an engine whose programs are compiled."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(HYBRID))
        fixed: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "batch_invariant": True}
        llm = LLM(folder, dtype=dtype, enable_prefix_caching=enable_prefix_caching, **fixed)
    llm.llm_engine.warm_up()
    ask(llm, [[FIRST_PLAIN_ID] * QUESTION])
    return llm


def ask(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """Continue each prompt greedily."""
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False)


if __name__ == "__main__":
    main()

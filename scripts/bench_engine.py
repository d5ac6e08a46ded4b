#!/usr/bin/env python3
"""Measure whole engines with dummy weights of real models' shapes: decode tokens per second at several batch sizes.

Beside each figure stands the floor that memory sets: parameters and KV cache read once a step, at the bandwidth of a
plain copy measured in the same run. --dry-run interprets the kernels of a GPU or TPU on a CPU, with a toy of a model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from bench_kernels import Bench, describe
from shapes import MODELS

from jaxllm import LLM, SamplingParams, TokensPrompt

BATCHES = (1, 16, 64, 256)
PROMPT, OUTPUT = 128, 64
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
       "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--dry-run", metavar="IMPLEMENTATION")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    dry = bool(args.dry_run)
    peaks = Bench(20, "bfloat16", 64, args.dry_run).peaks()
    report: dict[str, Any] = describe() | {"model": args.model, "peaks": peaks, "rows": []}
    prompt, output = (4, 2) if dry else (PROMPT, OUTPUT)
    with tempfile.TemporaryDirectory() as folder:
        hf = MODELS[args.model] | (TOY if dry else {})
        Path(folder, "config.json").write_text(json.dumps(hf))
        settings: dict[str, Any] = {"max_num_seqs": 2 if dry else max(BATCHES), "max_model_len": prompt + output}
        if dry:
            settings |= {"attention_config": {"backend": args.dry_run}, "enforce_eager": True, "block_size": 16}
            settings |= {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 4}
        llm = LLM(folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, **settings)
        llm.llm_engine.warm_up() if not dry else None
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(llm.llm_engine._core._core._runner._params))  # type: ignore[attr-defined]
        for batch in (1,) if dry else BATCHES:
            row = measure(llm, batch, prompt, output)
            kv_bytes = batch * (prompt + output / 2) * kv_bytes_per_token(hf)
            floor = (num_bytes + kv_bytes) / (peaks["copy_gb_per_s"] * 1e9)
            row |= {"floor_ms": round(floor * 1e3, 3), "of_floor": round(floor * 1e3 / row["step_ms"], 3)}
            report["rows"].append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(llm: LLM, batch: int, prompt: int, output: int) -> dict[str, Any]:
    """Time the decode steps of a batch: all outputs, less those of one token each."""
    prompts = [
        TokensPrompt(prompt_token_ids=[(7 * i + 13 * row) % 100 + 3 for i in range(prompt)]) for row in range(batch)
    ]

    def seconds(num_tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        llm.reset_prefix_cache()
        start = perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return perf_counter() - start

    seconds(2)
    times = sorted(seconds(output) - seconds(1) for _ in range(3))
    step = times[1] / (output - 1)
    return {"batch": batch, "step_ms": round(step * 1e3, 3), "tokens_per_s": round(batch / step, 1)}


def kv_bytes_per_token(hf: dict[str, Any]) -> int:
    """Return the bytes of one token's keys and values in bfloat16."""
    return hf["num_hidden_layers"] * hf["num_key_value_heads"] * hf["head_dim"] * 2 * 2


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compute lm-eval's log-likelihoods in this process, and compare: loglikelihoods.py MODEL GOT.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxllm import LLM, SamplingParams, TokensPrompt

TOLERANCE = 1e-4


def main(model: str, got: str) -> int:
    """Print the largest difference; returns 1 if it is more than rounding."""
    rows = json.loads(Path(got).read_text())
    with LLM(model, max_model_len=256, disable_log_stats=True) as llm:
        encode = llm.llm_engine.front.require_tokenizer().encode
        prompts, starts = [], []
        for row in rows:
            whole, context = encode([row["context"] + row["ending"], row["context"]], add_special_tokens=False)
            prompts.append(TokensPrompt(prompt_token_ids=whole))
            starts.append(len(context))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    worst, all_greedy = 0.0, True
    for row, start, output in zip(rows, starts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_token_ids is not None
        ending = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[start:]
        expected = sum(position[token].logprob for token, position in ending if position is not None)
        is_greedy = all(position[token].rank == 1 for token, position in ending if position is not None)
        worst, all_greedy = max(worst, abs(expected - row["logprob"])), all_greedy and is_greedy == row["is_greedy"]
    print(f"{len(rows)} log-likelihoods: at most {worst:.1e} apart, greedy ones the same: {all_greedy}")
    return int(worst > TOLERANCE or not all_greedy)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

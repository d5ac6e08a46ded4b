"""Check that greedy outputs agree with a reference in float32, near ties allowed.

Rounding may decide between two tokens that are about equally likely; after that the texts differ. So an output agrees
with the reference if it equals it to the end, or if its first other token has nearly the log-probability of the
reference's own token. The first other token of a wrong model does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peers.worker import BenchmarkError

NEAR_TIES = {"float32": 1e-3, "bfloat16": 0.25}
"""The difference of log-probabilities that counts as a near tie, by the dtype that is compared with the reference.

On SmolLM2-135M jaxllm, vLLM and HF in bfloat16 lose up to 0.16; an epsilon that is 100 times too large in the norms
loses 0.29, an fp8 KV cache 1.36, and a wrong RoPE leaves the likeliest tokens altogether.
"""
TOP = 20
"""The number of tokens per position with a log-probability in the reference; others are no near ties."""


@dataclass(frozen=True)
class Agreement:
    """The number of requests that are equal to the end, and where the others differ.

    `share_of_tokens` come before the first other token; `widest_gap` is the most log-probability that such a token lost
    against the reference's own.
    """

    requests: int
    same: int
    share_of_tokens: float
    widest_gap: float


def compare(name: str, reference: Sequence[Any], outputs: Sequence[Sequence[int]], dtype: str) -> Agreement:
    """Compare outputs with the reference's, which are [token, [[candidate, log-probability], ...]] for each token.

    Outputs may be longer than the reference. Raises BenchmarkError for a difference that is no near tie.
    """
    shares, gaps = [], []
    for number, (expected, output) in enumerate(zip(reference, outputs, strict=True)):
        if len(output) < len(expected):
            raise BenchmarkError(f"{name} ended request {number} after {len(output)} of {len(expected)} tokens.")
        tokens = [token for token, _ in expected]
        same = next((i for i, token in enumerate(tokens) if token != output[i]), len(tokens))
        shares.append(same / len(tokens))
        if same == len(tokens):
            continue
        logprobs = dict(expected[same][1])
        gap = logprobs[tokens[same]] - logprobs.get(output[same], float("-inf"))
        if gap > NEAR_TIES[dtype]:
            raise BenchmarkError(
                f"{name} disagrees with the reference: in request {number} its token {same} is {output[same]}, not "
                f"{tokens[same]}, which is likelier by {gap:.3g} in log-probability; up to {NEAR_TIES[dtype]:g} would "
                f"be rounding in {dtype}. There is no point in comparing the speed of different results."
            )
        gaps.append(gap)
    return Agreement(
        requests=len(shares),
        same=shares.count(1.0),
        share_of_tokens=round(sum(shares) / len(shares), 3),
        widest_gap=round(max(gaps, default=0.0), 4),
    )

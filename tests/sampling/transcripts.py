"""The rules of a transcript for one row, written as HF's three processors do it: an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.sampling.transcripts import TranscriptRules


def ruled(scores_v: np.ndarray, outputs: Sequence[int], rules: TranscriptRules, *, has_timestamps: bool) -> np.ndarray:
    """Return the scores of the token after `outputs`, in float32."""
    scores_v, first = scores_v.astype(np.float32), rules.first_timestamp
    scores_v[[each for each in rules.suppressed if each < len(scores_v)]] = -np.inf
    if not outputs:
        scores_v[[each for each in rules.suppressed_first if each < len(scores_v)]] = -np.inf
    if not has_timestamps:
        return scores_v
    scores_v[first - 1] = -np.inf
    last_was_timestamp = len(outputs) >= 1 and outputs[-1] >= first
    penultimate_was_timestamp = len(outputs) < 2 or outputs[-2] >= first
    if last_was_timestamp:
        if penultimate_was_timestamp:
            scores_v[first:] = -np.inf
        else:
            scores_v[: rules.end_of_text] = -np.inf
    timestamps = [token_id for token_id in outputs if token_id >= first]
    if timestamps:
        closes = last_was_timestamp and not penultimate_was_timestamp
        scores_v[first : timestamps[-1] if closes else timestamps[-1] + 1] = -np.inf
    if not outputs:
        scores_v[:first] = -np.inf
        scores_v[rules.last_initial + 1 :] = -np.inf
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(scores_v[first:].astype(np.float64)).sum())
    if total > scores_v[:first].max():
        scores_v[:first] = -np.inf
    return scores_v

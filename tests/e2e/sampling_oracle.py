"""The oracle is the whole sampler in float64 numpy, by the documented order; it shares no code with the engine's.

Raw logits; masks; logit_bias; custom processors; repetition, frequency and presence penalties; the greedy pick, or
temperature, min_p, top_k, top_p and a draw. What lies within rounding of a threshold may go either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from jaxllm import SamplingParams

GREEDY_BELOW = 1e-5
VALUE_TOLERANCE = 1e-4
MASS_TOLERANCE = 1e-6
"""The part of a row's probability that top_p and the draw may be off by."""


@dataclass(frozen=True)
class OracleRequest:
    """The sampling parameters of one output. What the engine derives from text is given as ids."""

    prompt: Sequence[int]
    params: SamplingParams
    eos: int
    seed: int = 0
    bad_words: Sequence[Sequence[int]] = ()
    """Ids of each bad word in each spelling."""
    follows: Callable[[Sequence[int]], set[int]] | None = None
    """A function that returns the tokens which a grammar or a thinking budget allows after an output."""
    process: Callable[[np.ndarray, Sequence[int], Sequence[int], float], np.ndarray] | None = None
    """The custom logits processor, over (logits, prompt, output, its extra argument)."""
    extra_arg: float = 0.0


class Kept(NamedTuple):
    """The ids that truncation must keep and those that it may keep, bool [v]."""

    must_v: np.ndarray
    may_v: np.ndarray


def allowed(request: OracleRequest, output: Sequence[int], v: int) -> np.ndarray:
    """Return bool [v]: which ids may come next. min_tokens yields where it would leave none."""
    params = request.params
    allowed_v = np.ones(v, bool)
    if params.allowed_token_ids is not None:
        allowed_v = np.isin(np.arange(v), params.allowed_token_ids)
    for *start, last in request.bad_words:
        if list(output[len(output) - len(start) :]) == start:
            allowed_v[last] = False
    if request.follows is not None:
        allowed_v &= np.isin(np.arange(v), list(request.follows(output)))
    if len(output) < params.min_tokens:
        early_v = allowed_v & ~np.isin(np.arange(v), [request.eos, *(params.stop_token_ids or ())])
        allowed_v = early_v if early_v.any() else allowed_v
    return allowed_v


def edit(raw_v: np.ndarray, request: OracleRequest, output: Sequence[int]) -> np.ndarray:
    """Return the logits after masks, biases, the custom processor and penalties."""
    params, v = request.params, len(raw_v)
    logits_v = np.where(allowed(request, output, v), raw_v, -np.inf)
    for token_id, bias in (params.logit_bias or {}).items():
        logits_v[token_id] += bias
    if request.process is not None:
        logits_v = request.process(logits_v, request.prompt, output, request.extra_arg)
    counts_v = np.bincount(np.asarray(output, int), minlength=v)
    seen_v = (np.bincount(np.asarray(request.prompt, int), minlength=v) + counts_v) > 0
    scaled_v = np.where(logits_v > 0, logits_v / params.repetition_penalty, logits_v * params.repetition_penalty)
    logits_v = np.where(seen_v, scaled_v, logits_v)
    return logits_v - params.frequency_penalty * counts_v - params.presence_penalty * (counts_v > 0)


def truncate(scaled_v: np.ndarray, top_k: int, top_p: float, min_p: float) -> Kept:
    """Return what min_p, top_k and top_p keep; ids as likely as the last one kept are kept too."""
    weights_v = np.exp(scaled_v - scaled_v.max())
    kept_v = (weights_v >= min_p) & (weights_v > 0)
    if 0 < top_k < len(scaled_v):
        kept_v &= weights_v >= np.sort(weights_v)[-top_k]
    if top_p >= 1.0:
        return Kept(kept_v, kept_v)
    left_v = np.where(kept_v, weights_v, 0.0)
    falling = np.sort(left_v)[::-1]

    def cut(mass: float) -> np.ndarray:
        count = int(np.searchsorted(np.cumsum(falling), mass * left_v.sum()))
        return kept_v & (left_v >= falling[min(count, len(falling) - 1)])

    return Kept(cut(top_p - MASS_TOLERANCE), cut(min(top_p + MASS_TOLERANCE, 1.0)))


@functools.cache
def uniform(seed: int, position: int) -> float:
    """Return a row's random number in [0, 1): as documented, from fold_in(key(seed), position)."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return float(jax.random.uniform(key))


def check_draw(token: int, scaled_v: np.ndarray, kept_v: np.ndarray, number: float) -> None:
    """Check that a token is where the cumulative distribution passes `number`, or next to that within rounding."""
    weights_v = np.where(kept_v, np.exp(scaled_v - scaled_v.max()), 0.0)
    ends_v = np.cumsum(weights_v) / weights_v.sum()
    assert kept_v[token], f"{token} was drawn, but is cut off"
    start, end = ends_v[token] - weights_v[token] / weights_v.sum(), ends_v[token]
    is_there = start - MASS_TOLERANCE <= number <= end + MASS_TOLERANCE
    assert is_there, f"{token} was drawn, which spans [{start}, {end}), by {number}"


def check_step(
    raw_v: np.ndarray, processed_v: np.ndarray, token: int, request: OracleRequest, output: Sequence[int]
) -> None:
    """Check one step: the processed logits that the engine computed, and the token that it chose."""
    params = request.params
    edited_v = edit(raw_v, request, output)
    is_greedy = params.temperature < GREEDY_BELOW
    expected_v = edited_v if is_greedy else edited_v / params.temperature
    must_v = may_v = np.isfinite(edited_v)
    if not is_greedy:
        must_v, may_v = truncate(expected_v, params.top_k, params.top_p, params.min_p)
    shown_v = np.isfinite(processed_v)
    wrong_v = (must_v & ~shown_v) | (shown_v & ~may_v)
    assert not wrong_v.any(), f"kept or dropped wrongly: {np.flatnonzero(wrong_v)}"
    error = np.abs(processed_v[shown_v] - expected_v[shown_v]).max()
    assert error <= VALUE_TOLERANCE, f"off by up to {error}"
    if is_greedy:
        assert token == int(edited_v.argmax()), f"greedy took {token} instead of {int(edited_v.argmax())}"
    else:
        check_draw(token, expected_v, shown_v, uniform(request.seed, len(request.prompt) + len(output)))

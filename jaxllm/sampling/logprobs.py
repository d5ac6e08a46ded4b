"""Compute log-probabilities or logits of the sampled token, of the most likely ids and of requested ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling.branches import when
from jaxllm.sampling.penalties import mask
from jaxllm.sampling.tiles import tile_maxima, top_ids

MAX_TOP_IDS = 128
"""The most ids that the device sorts; if more are wanted, the whole vocabulary goes to the host, which sorts it."""


class Logprobs(NamedTuple):
    """The values that each row returns: log-probabilities, or logits in the two modes for logits."""

    sampled_s: Array
    """The value of the sampled token itself."""
    rank_s: Array
    """int32 number of ids at least as likely as the token itself."""
    asked_sn: Array
    """The values of each row's `logprob_ids_sn`."""
    top_ids_sk: Array | None
    """The most likely ids in falling order; None if all_sv is set instead."""
    top_sk: Array | None
    all_sv: Array | None
    """The values of the whole vocabulary, by id."""


def fill_logprobs(value: Any, num_logprobs: int) -> Logprobs:
    """Return the Logprobs of a step with `num_logprobs`, with `value` in place of each array."""
    is_whole = num_logprobs > MAX_TOP_IDS
    top = None if is_whole else value
    return Logprobs(value, value, value, top, top, value if is_whole else None)


def gather_logprobs(
    values_sv: Array,
    tokens_s: Array,
    logprob_ids_sn: Array,
    *,
    num_logprobs: int,
    normalizes: bool,
    is_used: Array | bool,
    allowed_bits_sw: Array | None = None,
) -> Logprobs:
    """Return the values of logits to show; zeros unless `is_used`. With `normalizes`, log-probabilities; -inf stays.

    With `is_used` True itself the program has no branch. Ids whose bit in `allowed_bits_sw` is 0 count as -inf.
    """

    def gather(values_sv: Array) -> Logprobs:
        maxima_si = tile_maxima(values_sv)
        total_s1 = (
            jax.nn.logsumexp(values_sv, axis=1, keepdims=True) if normalizes else jnp.zeros_like(maxima_si[:, :1])
        )

        def shown(values_sk: Array) -> Array:
            return jnp.where(values_sk == -jnp.inf, -jnp.inf, values_sk - total_s1)

        token_s1 = jnp.take_along_axis(values_sv, tokens_s[:, None], axis=1)
        is_whole = num_logprobs > MAX_TOP_IDS
        top_sk, top_ids_sk = (None, None) if is_whole else top_ids(values_sv, maxima_si, num_logprobs)
        return Logprobs(
            sampled_s=shown(token_s1)[:, 0],
            rank_s=(values_sv >= token_s1).sum(axis=1, dtype=jnp.int32),
            asked_sn=shown(jnp.take_along_axis(values_sv, logprob_ids_sn, axis=1)),
            top_ids_sk=top_ids_sk,
            top_sk=None if top_sk is None else shown(top_sk),
            all_sv=shown(values_sv) if is_whole else None,
        )

    def nothing() -> Logprobs:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), jax.eval_shape(gather, values_sv))

    if allowed_bits_sw is None:
        return when(is_used, lambda: gather(values_sv), nothing)
    if is_used is True:
        return gather(mask(values_sv, allowed_bits_sw))
    # A branch of its own, as a cond that returns logits would copy them even if nothing is masked. The barrier
    # keeps the mask out of the sums, so that both branches compute the same, bit for bit.
    branches = (
        nothing,
        lambda: gather(values_sv),
        lambda: gather(lax.optimization_barrier(mask(values_sv, allowed_bits_sw))),
    )
    return lax.switch(jnp.where(is_used, 1 + (allowed_bits_sw != -1).any(), 0), branches)

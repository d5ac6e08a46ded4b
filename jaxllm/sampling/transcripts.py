"""The rules of a transcript's tokens, as HF's `generate` applies them to a Whisper: some tokens are never sampled, some
not as the first one, and timestamps come in pairs and never fall.

Rows are independent, and everything is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import logsumexp

from jaxllm.sampling.inputs import WITHOUT_TIMESTAMPS, TranscriptRows


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptRules:
    """The constants of a model's rules. Ids beyond the vocabulary change nothing."""

    suppressed: tuple[int, ...] = ()
    """The ids that are never sampled."""
    suppressed_first: tuple[int, ...] = ()
    """The ids that are not sampled as the first of the outputs."""
    first_timestamp: int
    """The id of the first timestamp: all after it are timestamps, and the one before says that there are none. It is
    the vocabulary's size in a model without timestamps."""
    end_of_text: int
    """The id that ends a transcript: lower ones are text, those between it and the timestamps are marks."""
    last_initial: int
    """The largest timestamp that a transcript may begin with."""


class TranscriptState(NamedTuple):
    """What the rules need of each row."""

    num_outputs_s: Array
    last_ids_s: Array
    """The token before the one to be sampled."""
    rows: TranscriptRows


def apply_rules(logits_sv: Array, rules: TranscriptRules, state: TranscriptState) -> Array:
    """Return logits with -inf for the ids that each row's transcript may not go on with."""
    vocab_size = logits_sv.shape[1]
    is_first_s1 = state.num_outputs_s[:, None] == 0
    at_first_v = _are_among(rules.suppressed_first, vocab_size)
    banned_sv = _are_among(rules.suppressed, vocab_size) | (is_first_s1 & at_first_v)
    has_rules_s1 = state.rows.latest_s[:, None] >= WITHOUT_TIMESTAMPS
    logits_sv = jnp.where(banned_sv & has_rules_s1, -jnp.inf, logits_sv)
    return logits_sv if rules.first_timestamp >= vocab_size else _apply_timestamps(logits_sv, rules, state)


def _apply_timestamps(logits_sv: Array, rules: TranscriptRules, state: TranscriptState) -> Array:
    first, vocab_size = rules.first_timestamp, logits_sv.shape[1]
    num_outputs_s, last_s, (before_s, latest_s) = state
    has_timestamps_s = latest_s > WITHOUT_TIMESTAMPS
    follows_s = (num_outputs_s > 0) & (last_s >= first)
    is_begun_s = (num_outputs_s < 2) | (before_s >= first)
    # The second timestamp of a pair, or the first of all, begins a segment: text follows. The first of a pair ends one.
    begins_s, ends_s = follows_s & is_begun_s, follows_s & ~is_begun_s
    latest_s = jnp.where(follows_s, last_s, latest_s)
    least_s = jnp.where(latest_s < first, first, latest_s + ~ends_s)
    most_s = jnp.where(num_outputs_s == 0, rules.last_initial, jnp.where(begins_s, first - 1, vocab_size))
    least_text_s = jnp.where(num_outputs_s == 0, first, jnp.where(ends_s, rules.end_of_text, 0))

    ids_v = jnp.arange(vocab_size, dtype=jnp.int32)
    is_timestamp_v = ids_v >= first
    allowed_sv = jnp.where(
        is_timestamp_v,
        (ids_v >= least_s[:, None]) & (ids_v <= most_s[:, None]),
        (ids_v >= least_text_s[:, None]) & (ids_v != first - 1),
    )
    allowed_sv |= ~has_timestamps_s[:, None]
    logits_sv = jnp.where(allowed_sv, logits_sv, -jnp.inf)
    # All timestamps together against each other id.
    is_time_s = logsumexp(logits_sv[:, first:], axis=1) > logits_sv[:, :first].max(axis=1)
    return jnp.where((has_timestamps_s & is_time_s)[:, None] & ~is_timestamp_v, -jnp.inf, logits_sv)


def _are_among(ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Return bool [v], True for these ids."""
    return np.isin(np.arange(vocab_size), ids)

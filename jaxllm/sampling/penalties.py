"""Apply masks, biases and penalties to logits before sampling; those that no row uses are skipped."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling.token_counts import in_prompt, with_drafts


def mask(logits_sv: Array, allowed_bits_sw: Array) -> Array:
    """Set the logits of ids whose bit is 0 to -inf."""
    bits_swb = (allowed_bits_sw[:, :, None] >> jnp.arange(32)) & 1
    allowed_sv = bits_swb.reshape(logits_sv.shape[0], -1)[:, : logits_sv.shape[1]] == 1
    return jnp.where(allowed_sv, logits_sv, -jnp.inf)


def add_biases(logits_sv: Array, ids_sb: Array, biases_sb: Array, num_biases: Array | None) -> Array:
    """Add the first `num_biases` columns of biases to their ids' logits, or all at once if it is None."""
    rows_s = jnp.arange(logits_sv.shape[0])
    if num_biases is None:
        return logits_sv.at[rows_s[:, None], ids_sb].add(biases_sb)

    def add_column(column: Array, logits_sv: Array) -> Array:
        return logits_sv.at[rows_s, ids_sb[:, column]].add(biases_sb[:, column])

    return lax.fori_loop(0, num_biases, add_column, logits_sv)


def penalize(
    logits_sv: Array,
    counts_cv: Array,
    count_rows_s: Array,
    drafts_sd: Array,
    presence_s: Array,
    frequency_s: Array,
    repetition_s: Array,
    *,
    is_used: Array,
) -> Array:
    """Penalize ids in the prompt or the output (repetition), or in the output only (the other two).

    On a CPU nothing is computed unless `is_used`.
    """
    num_rows = logits_sv.shape[0]
    settings = (drafts_sd, presence_s, frequency_s, repetition_s)

    def one_row(row: Array, logits_sv: Array) -> Array:
        at_row = partial(lax.dynamic_slice_in_dim, start_index=row, slice_size=1)
        counts_1v = counts_cv[at_row(count_rows_s)]
        penalized_1v = _penalize(at_row(logits_sv), counts_1v, *map(at_row, settings))
        return lax.dynamic_update_slice_in_dim(logits_sv, penalized_1v, row, 0)

    # Row by row on CPU: in place, without gathering the counts first, and nothing is done if no row uses it.
    return lax.platform_dependent(
        cpu=lambda: lax.fori_loop(0, jnp.where(is_used, num_rows, 0), one_row, logits_sv),
        default=lambda: _penalize(logits_sv, counts_cv[count_rows_s], *settings),
    )


def _penalize(
    logits_sv: Array,
    counts_sv: Array,
    drafts_sd: Array,
    presence_s: Array,
    frequency_s: Array,
    repetition_s: Array,
) -> Array:
    times_sv = with_drafts(counts_sv, drafts_sd)
    scaled_sv = jnp.where(logits_sv > 0, logits_sv / repetition_s[:, None], logits_sv * repetition_s[:, None])
    logits_sv = jnp.where(in_prompt(counts_sv) | (times_sv > 0), scaled_sv, logits_sv)
    logits_sv = logits_sv - frequency_s[:, None] * times_sv.astype(jnp.float32)
    return logits_sv - jnp.where(times_sv > 0, presence_s[:, None], 0.0)

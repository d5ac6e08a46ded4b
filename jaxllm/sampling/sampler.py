"""Sample the next token of every row.

Order of operations, as in vLLM: the mask of a grammar; values of the raw logits for logprobs; the other masks;
logit_bias; custom logits processors; repetition, frequency and presence penalties; the rules of transcripts; greedy
choice, or temperature, min_p, top_k, top_p and a draw. Everything is float32, and rows are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling.branches import when
from jaxllm.sampling.distribution import Distribution, is_greedy
from jaxllm.sampling.draw import draw, uniforms
from jaxllm.sampling.inputs import RareRules, Rules, SamplingBatch, Uses
from jaxllm.sampling.logprobs import Logprobs, gather_logprobs
from jaxllm.sampling.penalties import add_biases, mask, penalize
from jaxllm.sampling.processors import LogitsProcessor, LogitsState, process, runs_last
from jaxllm.sampling.shards import ShardedRows, VocabShards
from jaxllm.sampling.tiles import Rows, WholeRows, largest, most_likely
from jaxllm.sampling.token_counts import in_prompt, with_drafts
from jaxllm.sampling.truncation import truncate


def sample_plain(
    logits_sv: Array, batch: SamplingBatch, num_rows: Array | None = None, *, skips_unused: bool = True
) -> Array:
    """Return one token per row, by its temperature and seed only; for `skips_unused` see `branches`.

    `num_rows` is the number of rows in use, None if all are: see `WholeRows`.
    """
    return _sample_plain(WholeRows(logits_sv, num_rows), batch, skips_unused)


def sample_plain_shard(
    logits_sv: Array, batch: SamplingBatch, shards: VocabShards, *, skips_unused: bool = True
) -> Array:
    """Sample as `sample_plain` does, with the same tokens, where each device has a part of the vocabulary."""
    return _sample_plain(ShardedRows.of(logits_sv, shards), batch, skips_unused)


def _sample_plain(rows: Rows, batch: SamplingBatch, skips_unused: bool) -> Array:
    greedy_s, everything = _most_likely(rows, batch)

    def sample() -> Array:
        return draw(rows, everything, uniforms(batch.seeds_s2, batch.positions_s))

    is_greedy_s = is_greedy(batch.temperature_s)
    draws = ~is_greedy_s.all() if skips_unused else True
    return jnp.where(is_greedy_s, greedy_s, when(draws, sample, lambda: greedy_s))


def sample_truncated(logits_sv: Array, batch: SamplingBatch, *, skips_unused: bool = True) -> Array:
    """Return one token per row, by its temperature, truncation and seed; for `skips_unused` see `branches`."""
    uniforms_s = uniforms(batch.seeds_s2, batch.positions_s)
    return _pick(logits_sv, batch, uniforms_s, truncates=True, skips_unused=skips_unused)[0]


def sample_full(
    logits_sv: Array,
    batch: SamplingBatch,
    rules: Rules,
    rare: RareRules,
    uses: Uses,
    counts_cv: Array,
    *,
    num_logprobs: int,
    logprobs_mode: str,
    processors: tuple[LogitsProcessor, ...],
    last_edit: Callable[[Array], Array] | None = None,
    skips_unused: bool = True,
) -> tuple[Array, Logprobs]:
    """Return one token per row with every feature, and its log-probabilities.

    Args:
      logits_sv: float32.
      counts_cv: the token counts of all requests, uint16; read only.
      num_logprobs: the number of most likely ids to return, at least 1.
      logprobs_mode: "raw_logprobs", "processed_logprobs", "raw_logits" or "processed_logits".
      last_edit: what else is done to logits, after everything but temperature and truncation; None for nothing.
      skips_unused: skip features that no row uses, by `uses` and `rare`; see `branches`.
    """
    edits = partial(_edit, logits_sv, batch, rules, rare, counts_cv, processors, uses=uses, skips_unused=skips_unused)
    edit = edits if last_edit is None else lambda: last_edit(edits())
    pick = partial(
        _pick,
        batch=batch,
        uniforms_s=uniforms(batch.seeds_s2, batch.positions_s),
        truncates=uses.truncation > 0,
        skips_unused=skips_unused,
    )
    shows_processed = logprobs_mode.startswith("processed")
    edited_sv = logits_sv
    if processors or last_edit is not None or shows_processed or not skips_unused:
        edited_sv = edit()
        tokens_s, distribution = pick(edited_sv)
    else:
        # A cond that returns logits copies them, even if no row edits them. At 64 x 128k greedy with nothing in use
        # would cost 3.5 times what `sample_plain` does, instead of 1.03 times.
        is_edited = (uses.num_biases > 0) | (uses.penalties > 0) | (rare.allowed_bits_sw != -1).any()
        tokens_s, distribution = lax.cond(is_edited, lambda: pick(edit()), lambda: pick(logits_sv))
    is_scored_s = rules.is_scored_s > 0
    tokens_s = jnp.where(is_scored_s, rules.scored_ids_s, tokens_s)
    shown_sv = logits_sv
    if shows_processed:
        # As sampled from: greedy rows without temperature and truncation, prompt rows unchanged.
        shown_sv = jnp.where(is_greedy(batch.temperature_s)[:, None], edited_sv, distribution.scaled(edited_sv))
        shown_sv = jnp.where(is_scored_s[:, None], logits_sv, shown_sv)
    logprobs = gather_logprobs(
        shown_sv,
        tokens_s,
        rare.logprob_ids_sn,
        num_logprobs=num_logprobs,
        normalizes=logprobs_mode.endswith("logprobs"),
        is_used=uses.logprobs > 0 if skips_unused else True,
        allowed_bits_sw=None if shows_processed else rare.grammar_bits_sw,
    )
    return tokens_s, logprobs


def _edit(
    logits_sv: Array,
    batch: SamplingBatch,
    rules: Rules,
    rare: RareRules,
    counts_cv: Array,
    processors: tuple[LogitsProcessor, ...],
    *,
    uses: Uses,
    skips_unused: bool,
) -> Array:
    """Return the logits after masks, biases, custom processors and penalties."""
    logits_sv = mask(logits_sv, rare.allowed_bits_sw)
    logits_sv = add_biases(logits_sv, rare.bias_ids_sb, rare.bias_sb, uses.num_biases if skips_unused else None)
    first = tuple(each for each in processors if not runs_last(each))
    last = tuple(each for each in processors if runs_last(each))
    if first:
        logits_sv = process(logits_sv, _state(batch, rules, rare, counts_cv), first)
    logits_sv = penalize(
        logits_sv,
        counts_cv,
        rules.count_rows_s,
        rare.drafts_sd,
        rules.presence_s,
        rules.frequency_s,
        rules.repetition_s,
        is_used=uses.penalties > 0,
    )
    return process(logits_sv, _state(batch, rules, rare, counts_cv), last) if last else logits_sv


def _state(batch: SamplingBatch, rules: Rules, rare: RareRules, counts_cv: Array) -> LogitsState:
    """Return the state that processors may read besides the logits."""
    counts_sv = counts_cv[rules.count_rows_s]
    return LogitsState(
        num_outputs_s=rules.num_outputs_s,
        positions_s=batch.positions_s,
        output_counts_sv=with_drafts(counts_sv, rare.drafts_sd),
        in_prompt_sv=in_prompt(counts_sv),
        extra_args=rules.extra_args,
    )


def _most_likely(rows: Rows, batch: SamplingBatch) -> tuple[Array, Distribution]:
    """Return each row's most likely id, and the distribution of an untruncated draw."""
    # Without the barrier XLA would compute a row's maximum from all of its logits again.
    maxima_si = lax.optimization_barrier(rows.each_tile(largest))
    largest_s = maxima_si.max(axis=1)
    everything = Distribution(batch.temperature_s, largest_s, jnp.full_like(largest_s, -jnp.inf))
    return most_likely(rows, maxima_si), everything


def _pick(
    logits_sv: Array, batch: SamplingBatch, uniforms_s: Array, *, truncates: Array | bool, skips_unused: bool
) -> tuple[Array, Distribution]:
    """Return one token per row, and the distribution that it was drawn from; `truncates` if some row truncates."""
    rows = WholeRows(logits_sv)
    greedy_s, everything = _most_likely(rows, batch)

    def sample() -> tuple[Array, Distribution]:
        settings = (batch.top_k_s, batch.top_p_s, batch.min_p_s)
        least_s = truncate(logits_sv, everything, *settings, is_used=truncates)
        distribution = everything._replace(min_logit_s=least_s)
        return draw(rows, distribution, uniforms_s), distribution

    is_greedy_s = is_greedy(batch.temperature_s)
    draws = ~is_greedy_s.all() if skips_unused else True
    drawn_s, distribution = when(draws, sample, lambda: (greedy_s, everything))
    return jnp.where(is_greedy_s, greedy_s, drawn_s), distribution

"""Fill the records of a step's rows of logits: the token of each row, and how the row samples or scores. numpy only.

Row i belongs to chunk i and to its last token. After them come the extra rows, chunk by chunk: one before each draft,
which samples as the chunk's own row does, or one per scored prompt token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.constraints.bits import RowMask
from jaxllm.execution.packing import PackedInputs, RareSpec
from jaxllm.sampling.inputs import RareRules, Rules, Sampling, Uses
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import Chunk
from jaxllm.scheduling.request import needs_token_counts


class _ExtraRows(NamedTuple):
    """The extra rows of a chunk."""

    chunk: int
    """The chunk's index in the plan, which is its own row."""
    first: int
    """The first of the rows."""
    num_rows: int


def find_extra(chunks: Sequence[Chunk]) -> list[_ExtraRows]:
    """Return the extra rows of each chunk that has some."""
    extra, row = [], len(chunks)
    for index in [index for index, chunk in enumerate(chunks) if chunk.num_drafts or chunk.scored_ids]:
        extra.append(_ExtraRows(index, row, chunks[index].num_extra_rows))
        row += chunks[index].num_extra_rows
    return extra


def least_sampling(chunks: Sequence[Chunk], masks: Sequence[RowMask | None]) -> Sampling:
    """Return the least sampling that does what every row asks for; `masks` are those of the rows."""
    if masks.count(None) < len(masks) or any(map(_needs_full, chunks)):
        return Sampling.FULL
    truncates = any(chunk.samples and _truncates(chunk.params) for chunk in chunks)
    return Sampling.TRUNCATED if truncates else Sampling.PLAIN


def _needs_full(chunk: Chunk) -> bool:
    """Return whether a row of the chunk needs more than a draw, masks aside."""
    if not chunk.samples:
        return bool(chunk.scored_ids)
    params = chunk.params
    return bool(chunk.count_row is not None or chunk.scored_ids or params.logit_bias) or _wants_logprobs(params)


def fill_rows(inputs: PackedInputs, chunks: Sequence[Chunk], ends: np.ndarray, extra: Sequence[_ExtraRows]) -> None:
    """Fill the records of the rows, after those of sequences. `ends` are the chunks' ends."""
    num_seqs = len(chunks)
    params = [chunk.params for chunk in chunks]
    sampling, rules, uses = inputs.sampling, inputs.rules, inputs.uses
    seeds = np.array([chunk.seed for chunk in chunks], np.dtype("<u8"))
    sampling.seeds_s2[:num_seqs] = seeds.view(np.dtype("<i4")).reshape(num_seqs, 2)[:, ::-1]  # the high word first
    sampling.positions_s[:num_seqs] = ends
    sampling.temperature_s[:num_seqs] = [p.temperature for p in params]
    sampling.top_k_s[:num_seqs] = [p.top_k for p in params]
    sampling.top_p_s[:num_seqs] = [p.top_p for p in params]
    sampling.min_p_s[:num_seqs] = [p.min_p for p in params]
    rules.num_outputs_s[:num_seqs] = [chunk.num_output_tokens for chunk in chunks]
    for name, values_s in rules.extra_args.items():
        for row, row_params in enumerate(params):
            if row_params.extra_args and name in row_params.extra_args:
                values_s[row] = row_params.extra_args[name]
    sampled = [chunk.params for chunk in chunks if chunk.samples]
    uses.truncation[...] = any(map(_truncates, sampled))
    uses.logprobs[...] = any(map(_wants_logprobs, sampled))
    _fill_penalties(rules, uses, chunks)
    _fill_logit_rows(inputs, chunks, extra)
    for index, first, num_drafts in _drafted(chunks, extra):
        rows, before = slice(first, first + num_drafts), np.arange(-num_drafts, 0)
        for values_s in (*sampling, *rules[:-1], *rules.extra_args.values()):
            values_s[rows] = values_s[index]
        sampling.positions_s[rows] += before
        rules.num_outputs_s[rows] += before


def fill_rare(
    uses: Uses,
    chunks: Sequence[Chunk],
    masks: Sequence[RowMask | None],
    specs: RareRules,
    extra: Sequence[_ExtraRows],
) -> RareRules:
    """Return the arrays that some row needs, and None for the others; set the number of biases in `uses`."""
    bias_ids_sb = bias_sb = logprob_ids_sn = None
    sampled = [(row, chunk) for row, chunk in enumerate(chunks) if chunk.samples]
    drafted = _drafted(chunks, extra)
    for index, first, num_drafts in drafted:
        sampled += [(row, chunks[index]) for row in range(first, first + num_drafts)]
    masked = [(row, chunk, mask) for row, chunk in sampled if (mask := masks[row]) is not None]
    allowed = [(row, mask.allowed_w) for row, _, mask in masked]
    by_grammar = [
        (row, mask.grammar_w)
        for row, chunk, mask in masked
        if mask.grammar_w is not None and _wants_logprobs(chunk.params)
    ]
    biased = [(row, chunk.params.logit_bias) for row, chunk in sampled if chunk.params.logit_bias]
    if biased:
        bias_ids_sb, bias_sb = specs.bias_ids_sb.neutral(), specs.bias_sb.neutral()
        for row, bias in biased:
            bias_ids_sb[row, : len(bias)] = list(bias)
            bias_sb[row, : len(bias)] = list(bias.values())
        uses.num_biases[...] = max(len(bias) for _, bias in biased)
    asked = [(row, ids) for row, ids in enumerate(_asked_ids(chunks, extra)) if ids] if uses.logprobs else []
    if asked:
        logprob_ids_sn = specs.logprob_ids_sn.neutral()
        for row, ids in asked:
            logprob_ids_sn[row, : len(ids)] = np.maximum(ids, 0)  # -1 only fills a row up
    return RareRules(
        allowed_bits_sw=_join_bits(allowed, specs.allowed_bits_sw),
        grammar_bits_sw=_join_bits(by_grammar, specs.grammar_bits_sw),
        bias_ids_sb=bias_ids_sb,
        bias_sb=bias_sb,
        logprob_ids_sn=logprob_ids_sn,
        **_counted_drafts(chunks, drafted, specs),
    )


def _drafted(chunks: Sequence[Chunk], extra: Sequence[_ExtraRows]) -> list[_ExtraRows]:
    """Return the extra rows that come before drafts."""
    return [rows for rows in extra if chunks[rows.chunk].num_drafts]


def _counted_drafts(
    chunks: Sequence[Chunk], drafted: Sequence[_ExtraRows], specs: RareRules
) -> dict[str, np.ndarray | None]:
    """Make the arrays of the drafts that come before rows whose tokens are counted."""
    drafted = [each for each in drafted if chunks[each.chunk].count_row is not None]
    if not drafted:
        return {"drafts_sd": None, "draft_rows_sd": None}
    drafts_sd, draft_rows_sd = specs.drafts_sd.neutral(), specs.draft_rows_sd.neutral()
    for index, first, num_drafts in drafted:
        drafts = chunks[index].drafts
        for count, row in enumerate([*range(first + 1, first + num_drafts), index], start=1):
            drafts_sd[row, :count] = drafts[:count]
            draft_rows_sd[row, :count] = range(first, first + count)
    return {"drafts_sd": drafts_sd, "draft_rows_sd": draft_rows_sd}


def _join_bits(rows: Sequence[tuple[int, np.ndarray]], spec: RareSpec) -> np.ndarray | None:
    """Return an array with the bits of `rows`, and neutral ones elsewhere; None if there are no rows."""
    if not rows:
        return None
    bits_sw = spec.neutral()
    for row, bits_w in rows:
        bits_sw[row] = bits_w
    return bits_sw


def _truncates(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _wants_logprobs(params: SamplingParams) -> bool:
    return params.logprobs is not None or bool(params.logprob_token_ids)


def _asked_ids(chunks: Sequence[Chunk], extra: Sequence[_ExtraRows]) -> Iterator[list[int] | None]:
    """Yield the token ids that each row is asked for."""
    for chunk in chunks:
        yield chunk.params.logprob_token_ids if chunk.samples else None
    for chunk in [chunks[rows.chunk] for rows in extra]:
        for _ in range(chunk.num_drafts):
            yield chunk.params.logprob_token_ids
        for position in range(chunk.score_start, chunk.score_start + len(chunk.scored_ids)):
            yield chunk.params.prompt_ids_at(position)


def _fill_penalties(rules: Rules, uses: Uses, chunks: Sequence[Chunk]) -> None:
    for row, chunk in enumerate(chunks):
        if chunk.count_row is None or not chunk.samples:
            continue
        rules.count_rows_s[row] = chunk.count_row
        params = chunk.params
        rules.presence_s[row] = params.presence_penalty
        rules.frequency_s[row] = params.frequency_penalty
        rules.repetition_s[row] = params.repetition_penalty
        if needs_token_counts(params):
            uses.penalties[...] = 1


def _fill_logit_rows(inputs: PackedInputs, chunks: Sequence[Chunk], extra: Sequence[_ExtraRows]) -> None:
    """Fill in the token of each row; the prompt token at position p - 1 predicts the one at p."""
    logit_rows, rules, sequences = inputs.logit_rows, inputs.rules, inputs.sequences
    logit_rows.logit_tokens_s[: len(chunks)] = sequences.query_ends_s[: len(chunks)] - 1
    for index, first, num_rows in extra:
        chunk, rows = chunks[index], slice(first, first + num_rows)
        if chunk.num_drafts:
            last_token = int(logit_rows.logit_tokens_s[index])
            logit_rows.logit_tokens_s[rows] = np.arange(last_token - num_rows, last_token)
            continue
        first_token = int(sequences.query_starts_s[index])
        logit_rows.logit_tokens_s[rows] = first_token + chunk.score_start - 1 - chunk.start + np.arange(num_rows)
        rules.is_scored_s[rows] = 1
        rules.scored_ids_s[rows] = np.frombuffer(chunk.scored_ids, np.int32)
        inputs.uses.logprobs[...] = 1
    logit_rows.num_rows[...] = len(chunks) + sum(rows.num_rows for rows in extra)

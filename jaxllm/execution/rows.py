"""Fill the records of a step's rows of logits: the token of each row, and how the row samples or scores. numpy only.

Row i belongs to chunk i and to its last token. After them come the extra rows, chunk by chunk: one before each draft,
which samples as the chunk's own row does, or one per scored prompt token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from jaxllm.constraints.bits import RowMask
from jaxllm.execution.kept_rows import RowSettings, Wants, to_int32
from jaxllm.execution.packing import PackedInputs, RareSpec
from jaxllm.sampling.inputs import WITHOUT_RULES, WITHOUT_TIMESTAMPS, RareRules, Sampling, Uses
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import NO_IDS, ExtraRows, Owner, StepPlan


def least_sampling(plan: StepPlan, rows: RowSettings, masks: Sequence[RowMask | None]) -> Sampling:
    """Return the least sampling that does what every row asks for; `masks` are those of the rows."""
    is_scored = any(extra.chunk.scored_ids for extra in plan.extra_rows)
    if is_scored or masks.count(None) < len(masks) or rows.sampled(Wants.FULL).any():
        return Sampling.FULL
    return Sampling.TRUNCATED if rows.sampled(Wants.TRUNCATION).any() else Sampling.PLAIN


def fill_rows(inputs: PackedInputs, plan: StepPlan, rows: RowSettings, ends: np.ndarray) -> None:
    """Fill the records of the rows, after those of sequences. `ends` are the chunks' ends."""
    num_seqs = plan.num_chunks
    sampling, rules, uses = inputs.sampling, inputs.rules, inputs.uses
    sampling.seeds_s2[:num_seqs] = rows.seeds_s2
    sampling.positions_s[:num_seqs] = ends
    sampling.temperature_s[:num_seqs] = rows.temperature_s
    sampling.top_k_s[:num_seqs] = rows.top_k_s
    sampling.top_p_s[:num_seqs] = rows.top_p_s
    sampling.min_p_s[:num_seqs] = rows.min_p_s
    first = len(plan.decodes.starts)
    rules.num_outputs_s[:first] = ends[:first] - rows.prompt_lens_s[:first]
    rules.num_outputs_s[first:num_seqs] = to_int32([chunk.num_output_tokens for chunk in plan.others])
    for name, values_s in rules.extra_args.items():
        for row, chunk in enumerate(plan.chunks):
            if chunk.params.extra_args and name in chunk.params.extra_args:
                values_s[row] = chunk.params.extra_args[name]
    uses.truncation[...] = rows.sampled(Wants.TRUNCATION).any()
    uses.logprobs[...] = rows.sampled(Wants.LOGPROBS).any()
    counted = np.flatnonzero(rows.sampled(Wants.COUNTS))
    if len(counted):
        rules.count_rows_s[counted] = rows.count_rows_s[counted]
        rules.presence_s[counted] = rows.presence_s[counted]
        rules.frequency_s[counted] = rows.frequency_s[counted]
        rules.repetition_s[counted] = rows.repetition_s[counted]
        uses.penalties[...] = (rows.wants_s[counted] & int(Wants.PENALTIES)).any()
    _fill_logit_rows(inputs, plan)
    for index, first, num_drafts, _ in _drafted(plan):
        extra, before = slice(first, first + num_drafts), np.arange(-num_drafts, 0)
        for values_s in (*sampling, *rules[:-1], *rules.extra_args.values()):
            values_s[extra] = values_s[index]
        sampling.positions_s[extra] += before
        rules.num_outputs_s[extra] += before


def fill_transcripts(inputs: PackedInputs, plan: StepPlan, first_timestamp: int | None) -> None:
    """Fill in what the rules of transcripts need of each row that samples; nothing if there are none."""
    if first_timestamp is None:
        return
    [transcripts], decodes = inputs.transcripts, plan.decodes
    rows = list(enumerate(zip(decodes.owners, decodes.starts, [NO_IDS] * len(decodes.starts), strict=True)))
    for row, chunk in enumerate(plan.others, start=len(rows)):
        rows.append((row, (chunk.owner, chunk.start, chunk.token_ids[:-1])))
    for _, first, num_drafts, chunk in _drafted(plan):
        extra = range(first, first + num_drafts)
        rows += [(row, (chunk.owner, chunk.start, chunk.token_ids[: row - first])) for row in extra]
    for row, (owner, start, chunk_ids) in rows:
        transcripts.before_s[row], transcripts.latest_s[row] = _heard(owner, start, chunk_ids, first_timestamp)


def _heard(owner: Owner, start: int, chunk_ids: array[int], first_timestamp: int) -> tuple[int, int]:
    """Return the entries of `TranscriptRows` of a row, after `chunk_ids` at the start of its chunk."""
    num_prompt_tokens, params = owner.num_prompt_tokens, owner.params
    if owner.token_ids is None or params.allowed_token_ids is not None or params.structured_outputs is not None:
        return -1, WITHOUT_RULES
    outputs = (owner.token_ids[:start] + chunk_ids)[num_prompt_tokens:]
    before = outputs[-1] if outputs else -1
    if first_timestamp - 1 in owner.token_ids[:num_prompt_tokens]:  # which says that there are none
        return before, WITHOUT_TIMESTAMPS
    return before, next((token_id for token_id in reversed(outputs) if token_id >= first_timestamp), 0)


def fill_rare(
    uses: Uses, plan: StepPlan, rows: RowSettings, masks: Sequence[RowMask | None], specs: RareRules
) -> RareRules:
    """Return the arrays that some row needs, and None for the others; set the number of biases in `uses`."""
    wants_none = not plan.extra_rows and masks.count(None) == len(masks)
    if wants_none and not rows.sampled(Wants.BIAS | Wants.ASKED_IDS).any():
        return RareRules(*(None for _ in specs))
    chunks, bias_ids_sb, bias_sb, logprob_ids_sn = plan.chunks, None, None, None
    sampled = [(row, chunk) for row, chunk in enumerate(chunks) if chunk.samples]
    drafted = _drafted(plan)
    for _, first, num_drafts, chunk in drafted:
        sampled += [(row, chunk) for row in range(first, first + num_drafts)]
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
    asked = [(row, ids) for row, ids in enumerate(_asked_ids(plan)) if ids] if uses.logprobs else []
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
        **_counted_drafts(drafted, specs),
    )


def _drafted(plan: StepPlan) -> list[ExtraRows]:
    """Return the extra rows that come before drafts."""
    return [rows for rows in plan.extra_rows if rows.chunk.num_drafts]


def _counted_drafts(drafted: Sequence[ExtraRows], specs: RareRules) -> dict[str, np.ndarray | None]:
    """Make the arrays of the drafts that come before rows whose tokens are counted."""
    drafted = [each for each in drafted if each.chunk.owner.count_row is not None]
    if not drafted:
        return {"drafts_sd": None, "draft_rows_sd": None}
    drafts_sd, draft_rows_sd = specs.drafts_sd.neutral(), specs.draft_rows_sd.neutral()
    for index, first, num_drafts, chunk in drafted:
        drafts = chunk.drafts
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


def _wants_logprobs(params: SamplingParams) -> bool:
    return params.logprobs is not None or bool(params.logprob_token_ids)


def _asked_ids(plan: StepPlan) -> Iterator[list[int] | None]:
    """Yield the token ids that each row is asked for."""
    chunks = plan.chunks
    for chunk in chunks:
        yield chunk.params.logprob_token_ids if chunk.samples else None
    for chunk in [rows.chunk for rows in plan.extra_rows]:
        for _ in range(chunk.num_drafts):
            yield chunk.params.logprob_token_ids
        for position in range(chunk.score_start, chunk.score_start + len(chunk.scored_ids)):
            yield chunk.params.prompt_ids_at(position)


def _fill_logit_rows(inputs: PackedInputs, plan: StepPlan) -> None:
    """Fill in the token of each row; the prompt token at position p - 1 predicts the one at p."""
    logit_rows, rules, sequences, num_chunks = inputs.logit_rows, inputs.rules, inputs.sequences, plan.num_chunks
    logit_rows.logit_tokens_s[:num_chunks] = sequences.query_ends_s[:num_chunks] - 1
    for index, first, num_rows, chunk in plan.extra_rows:
        rows = slice(first, first + num_rows)
        if chunk.num_drafts:
            last_token = int(logit_rows.logit_tokens_s[index])
            logit_rows.logit_tokens_s[rows] = np.arange(last_token - num_rows, last_token)
            continue
        first_token = int(sequences.query_starts_s[index])
        logit_rows.logit_tokens_s[rows] = first_token + chunk.score_start - 1 - chunk.start + np.arange(num_rows)
        rules.is_scored_s[rows] = 1
        rules.scored_ids_s[rows] = np.frombuffer(chunk.scored_ids, np.int32)
        inputs.uses.logprobs[...] = 1
    logit_rows.num_rows[...] = plan.num_rows

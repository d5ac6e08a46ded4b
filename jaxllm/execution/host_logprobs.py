"""Convert a step's log-probabilities to plain Python values, one `TokenLogprobs` per row that asked for them.

And its hidden states, as `HiddenStates` of each chunk that asked for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from jaxllm.core_messages import HiddenStates, TokenLogprobs
from jaxllm.execution.batch import first_rows
from jaxllm.sampling.logprobs import Logprobs
from jaxllm.scheduling.plan import Chunk, StepPlan


class _Wish(NamedTuple):
    """The log-probabilities that one row asks for."""

    num_top: int
    """The number of likeliest tokens; -1 is the whole vocabulary."""
    asked_ids: list[int]
    """The ids that are asked for by name; -1 stands for no token, and scores -inf."""


def read_logprobs(
    plan: StepPlan, token_ids: Sequence[int], logprobs: Logprobs
) -> tuple[list[list[TokenLogprobs] | None], list[list[TokenLogprobs]]]:
    """Return for each chunk the log-probabilities of the rows that it sampled, and an entry per scored prompt token.

    `token_ids` are the tokens of all rows.
    """
    chunks = plan.chunks
    rows = _read_rows(list(_wishes(chunks)), token_ids, logprobs)
    sampled = [None if own is None else [own] for own in rows[: len(chunks)]]
    scored: list[list[TokenLogprobs]] = [[] for _ in chunks]
    for index, first, num_rows, chunk in plan.extra_rows:
        target = sampled[index] if chunk.num_drafts else scored[index]
        if target is not None:
            target[:0] = [entry for entry in rows[first : first + num_rows] if entry is not None]
    return sampled, scored


def _wishes(chunks: Sequence[Chunk]) -> Iterator[_Wish | None]:
    for chunk in chunks:
        yield _wish(chunk)
    for chunk in chunks:
        params = chunk.params
        for _ in range(chunk.num_drafts):
            yield _wish(chunk)
        for position in range(chunk.score_start, chunk.score_start + len(chunk.scored_ids)):
            yield _Wish(params.prompt_logprobs or 0, params.prompt_ids_at(position) or [])


def _wish(chunk: Chunk) -> _Wish | None:
    """Return the log-probabilities that a row that the chunk samples asks for."""
    params = chunk.params
    if not chunk.samples or params.num_logprobs is None:
        return None
    if params.logprob_token_ids:
        return _Wish(0, params.logprob_token_ids)
    return _Wish(params.num_logprobs, [])


def _read_rows(
    wishes: Sequence[_Wish | None], token_ids: Sequence[int], logprobs: Logprobs
) -> list[TokenLogprobs | None]:
    """Convert each array once for all rows, up to the last column that some row wants: Python numbers are expensive."""
    top_ids, top = _top(wishes, logprobs)
    num_rows, most_asked = len(wishes), max((len(wish.asked_ids) for wish in wishes if wish is not None), default=0)
    sampled, ranks = (np.asarray(x)[:num_rows] for x in (logprobs.sampled_s, logprobs.rank_s))
    parts = [sampled, top]
    if most_asked:
        parts.append(np.asarray(logprobs.asked_sn)[:num_rows, :most_asked])
    ids, values = np.column_stack((token_ids, top_ids)).tolist(), np.column_stack(parts).tolist()
    num_columns = top.shape[1]
    entries: list[TokenLogprobs | None] = []
    for wish, row_ids, row_values, rank in zip(wishes, ids, values, ranks.tolist(), strict=True):
        if wish is None:
            entries.append(None)
            continue
        end = 1 + (num_columns if wish.num_top < 0 else wish.num_top)
        if wish.asked_ids:
            asked = zip(wish.asked_ids, row_values[1 + num_columns :], strict=False)
            row_ids = row_ids[:end] + wish.asked_ids
            row_values = row_values[:end] + [value if each >= 0 else -math.inf for each, value in asked]
            entries.append(TokenLogprobs(row_ids, row_values, rank))
        else:
            entries.append(TokenLogprobs(row_ids[:end], row_values[:end], rank))
    return entries


def _top(wishes: Sequence[_Wish | None], logprobs: Logprobs) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and values of each row's most likely ids, in as many columns as the most that a row asks for."""
    num_rows = len(wishes)
    counts = [wish.num_top for wish in wishes if wish is not None]
    wants_all, most = min(counts, default=0) < 0, max(counts, default=0)
    if logprobs.all_sv is None:
        top_ids, top = np.asarray(logprobs.top_ids_sk)[:num_rows], np.asarray(logprobs.top_sk)[:num_rows]
        columns = top.shape[1] if wants_all else most
        return top_ids[:, :columns], top[:, :columns]
    # Only with a large max_logprobs: the device returns all values, and the host sorts them.
    all_sv = np.asarray(logprobs.all_sv)
    columns = all_sv.shape[1] if wants_all else most
    top_ids, top = np.zeros((num_rows, columns), np.int32), np.zeros((num_rows, columns), np.float32)
    for row, wish in enumerate(wishes):
        if wish is not None and wish.num_top:
            ids = np.argsort(-all_sv[row], kind="stable")[:columns]
            top_ids[row], top[row] = ids, all_sv[row, ids]
    return top_ids, top


def read_hidden_states(plan: StepPlan, features_tf: Array, row_alignment: int) -> dict[int, HiddenStates]:
    """Return the hidden states that chunks asked for, by their indices; nothing is fetched if none did."""
    first, asked = len(plan.decodes.starts), dict[int, tuple[int, int]]()
    for index, chunk in enumerate(plan.others, start=first):  # the other rows are of outputs
        end = min(chunk.start + len(chunk.token_ids), chunk.owner.num_prompt_tokens)
        start = max(chunk.start, end if chunk.owner.hidden_states is None else 0)
        if chunk.owner.hidden_states == "last":
            start = max(start, chunk.owner.num_prompt_tokens - 1)
        if start < end:
            asked[index] = start, end
    if not asked:
        return {}
    lengths = np.array([1] * first + [len(chunk.token_ids) for chunk in plan.others])
    starts, array_tf = first_rows(lengths, row_alignment), np.asarray(features_tf)
    states = {}
    for index, (start, end) in asked.items():
        row = int(starts[index]) + start - plan.others[index - first].start
        states[index] = HiddenStates(start, end - start, array_tf[row : row + end - start].astype(np.float32).tobytes())
    return states

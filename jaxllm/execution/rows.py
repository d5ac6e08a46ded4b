"""The rows of logits of a step: which token each looks at, and how it samples or scores. numpy only.

Row i belongs to chunk i and to its last token; after them comes one row per scored prompt token, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.constraints.bits import RowMask
from jaxllm.params.limits import MAX_LOGIT_BIASES, MAX_LOGPROB_TOKEN_IDS
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import Chunk
from jaxllm.scheduling.request import needs_token_counts

type Fields = tuple[tuple[str, tuple[int, ...]], ...]
type ExtraArgs = tuple[tuple[str, int | float], ...]
"""Names of the logits processors' arguments, with their defaults, whose types are the fields' types."""

EXTRA = "extra_args."


class RareInputs(NamedTuple):
    """Arrays that few steps need: None where no row of the step does."""

    allowed_bits_sw: Any
    """int32 bits, 32 ids a word: which ids each row may sample."""
    grammar_bits_sw: Any
    """The same by each row's grammar alone, for log-probabilities."""
    bias_ids_sn: Any
    bias_sn: Any
    logprob_ids_sn: Any


def int_row_fields(num_rows: int, extra_args: ExtraArgs) -> Fields:
    """Return name and shape of the rows' part of the int32 buffer."""
    s = num_rows
    return (
        ("logit_tokens", (s,)),
        ("seeds", (s, 2)),
        ("sampled_positions", (s,)),
        ("num_outputs", (s,)),
        ("top_k", (s,)),
        ("is_scored", (s,)),
        ("scored_ids", (s,)),
        ("count_rows", (s,)),
        *((EXTRA + name, (s,)) for name, default in extra_args if isinstance(default, int)),
        ("num_rows", ()),
        ("num_biases", ()),
        ("uses_penalties", ()),
        ("uses_truncation", ()),
        ("uses_logprobs", ()),
    )


def float_row_fields(num_rows: int, extra_args: ExtraArgs) -> Fields:
    """Return name and shape of what the float32 buffer holds, in order."""
    names = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    extra = (EXTRA + name for name, default in extra_args if not isinstance(default, int))
    return tuple((name, (num_rows,)) for name in (*names, *extra))


def rare_shapes(num_rows: int, vocab_size: int) -> RareInputs:
    """Return (shape, dtype, neutral value) of each rare input."""
    bits = ((num_rows, -(-vocab_size // 32)), np.int32, -1)
    biases, ids = (num_rows, MAX_LOGIT_BIASES), (num_rows, MAX_LOGPROB_TOKEN_IDS)
    return RareInputs(
        allowed_bits_sw=bits,
        grammar_bits_sw=bits,
        bias_ids_sn=(biases, np.int32, 0),
        bias_sn=(biases, np.float32, 0.0),
        logprob_ids_sn=(ids, np.int32, 0),
    )


def needs_full(chunk: Chunk, mask: RowMask | None) -> bool:
    """Say whether a chunk's rows are beyond greedy, temperature and seed."""
    if chunk.scored_ids:
        return True
    if not chunk.samples:
        return False
    params = chunk.params
    return (
        mask is not None
        or chunk.slot is not None
        or _truncates(params)
        or _wants_logprobs(params)
        or bool(params.logit_bias)
    )


def fill_rows(
    ints: dict[str, np.ndarray], floats: dict[str, np.ndarray], chunks: Sequence[Chunk], extra_args: ExtraArgs
) -> None:
    """Fill the rows' fields; those of tokens must be filled."""
    num_seqs = len(chunks)
    params = [chunk.params for chunk in chunks]
    floats["temperature"][:num_seqs] = [p.temperature for p in params]
    floats["top_p"][:] = floats["repetition"][:] = 1.0
    floats["top_p"][:num_seqs] = [p.top_p for p in params]
    floats["min_p"][:num_seqs] = [p.min_p for p in params]
    ints["top_k"][:num_seqs] = [p.top_k for p in params]
    ints["sampled_positions"][:num_seqs] = ints["context_lens"][:num_seqs]
    ints["num_outputs"][:num_seqs] = [chunk.num_output_tokens for chunk in chunks]
    ints["logit_tokens"][:num_seqs] = ints["query_ends"][:num_seqs] - 1
    seeds = np.array([chunk.seed for chunk in chunks], np.dtype("<u8"))
    ints["seeds"][:num_seqs] = seeds.view(np.dtype("<i4")).reshape(num_seqs, 2)[:, ::-1]  # the high word first
    ints["num_rows"][...] = num_seqs
    ints["uses_truncation"][...] = any(map(_truncates, params))
    ints["uses_logprobs"][...] = any(chunk.samples and _wants_logprobs(chunk.params) for chunk in chunks)
    _fill_penalties(ints, floats, chunks)
    _fill_scored(ints, chunks)
    _fill_extra_args(ints, floats, params, extra_args)


def fill_rare(
    ints: dict[str, np.ndarray],
    chunks: Sequence[Chunk],
    masks: Sequence[RowMask | None],
    num_rows: int,
    vocab_size: int,
) -> RareInputs:
    """Make the arrays that some row needs, and count what is in use of them in `ints`."""
    shapes = rare_shapes(num_rows, vocab_size)
    bias_ids_sn = bias_sn = logprob_ids_sn = None
    masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    allowed = [(row, mask.allowed_w) for row, mask in masked]
    by_grammar = [
        (row, mask.grammar_w)
        for row, mask in masked
        if mask.grammar_w is not None and _wants_logprobs(chunks[row].params)
    ]
    biased = [(row, c.params.logit_bias) for row, c in enumerate(chunks) if c.samples and c.params.logit_bias]
    if biased:
        bias_ids_sn, bias_sn = neutral_array(shapes.bias_ids_sn), neutral_array(shapes.bias_sn)
        for row, bias in biased:
            bias_ids_sn[row, : len(bias)] = list(bias)
            bias_sn[row, : len(bias)] = list(bias.values())
        ints["num_biases"][...] = max(len(bias) for _, bias in biased)
    asked = [(row, ids) for row, ids in enumerate(_asked_ids(chunks)) if ids]
    if asked:
        logprob_ids_sn = neutral_array(shapes.logprob_ids_sn)
        for row, ids in asked:
            logprob_ids_sn[row, : len(ids)] = np.maximum(ids, 0)  # -1 only fills a row up
    return RareInputs(
        allowed_bits_sw=_join_bits(allowed, shapes.allowed_bits_sw),
        grammar_bits_sw=_join_bits(by_grammar, shapes.grammar_bits_sw),
        bias_ids_sn=bias_ids_sn,
        bias_sn=bias_sn,
        logprob_ids_sn=logprob_ids_sn,
    )


def _join_bits(rows: Sequence[tuple[int, np.ndarray]], spec: tuple[tuple[int, ...], Any, Any]) -> np.ndarray | None:
    """Return an array with these rows' bits, and the neutral ones elsewhere; None without any."""
    if not rows:
        return None
    bits_sw = neutral_array(spec)
    for row, bits_w in rows:
        bits_sw[row] = bits_w
    return bits_sw


def neutral_array(spec: tuple[tuple[int, ...], Any, Any]) -> np.ndarray:
    """Make one of `rare_shapes`, as it is where nobody uses it."""
    shape, dtype, neutral = spec
    return np.full(shape, neutral, dtype)


def _truncates(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _wants_logprobs(params: SamplingParams) -> bool:
    return params.logprobs is not None or bool(params.logprob_token_ids)


def _asked_ids(chunks: Sequence[Chunk]) -> Iterator[list[int] | None]:
    """Yield the token ids that each row is asked for."""
    for chunk in chunks:
        yield chunk.params.logprob_token_ids if chunk.samples else None
    for chunk in chunks:
        for position in range(chunk.score_start, chunk.score_start + len(chunk.scored_ids)):
            yield chunk.params.prompt_ids_at(position)


def _fill_penalties(ints: dict[str, np.ndarray], floats: dict[str, np.ndarray], chunks: Sequence[Chunk]) -> None:
    for row, chunk in enumerate(chunks):
        if chunk.slot is None or not chunk.samples:
            continue
        ints["count_rows"][row] = chunk.slot + 1  # row 0 is for those that count nothing
        params = chunk.params
        floats["presence"][row] = params.presence_penalty
        floats["frequency"][row] = params.frequency_penalty
        floats["repetition"][row] = params.repetition_penalty
        if needs_token_counts(params):
            ints["uses_penalties"][...] = 1


def _fill_scored(ints: dict[str, np.ndarray], chunks: Sequence[Chunk]) -> None:
    """Add the rows of prompt tokens: the token at position p - 1 predicts the one at p."""
    row = len(chunks)
    for index, chunk in enumerate(chunks):
        count = len(chunk.scored_ids)
        if not count:
            continue
        first_token = int(ints["query_starts"][index])
        rows = slice(row, row + count)
        ints["logit_tokens"][rows] = first_token + chunk.score_start - 1 - chunk.start + np.arange(count)
        ints["is_scored"][rows] = 1
        ints["scored_ids"][rows] = np.frombuffer(chunk.scored_ids, np.int32)
        row += count
    if row > len(chunks):
        ints["num_rows"][...] = row
        ints["uses_logprobs"][...] = 1


def _fill_extra_args(
    ints: dict[str, np.ndarray],
    floats: dict[str, np.ndarray],
    params: Sequence[SamplingParams],
    extra_args: ExtraArgs,
) -> None:
    for name, default in extra_args:
        field = (ints if isinstance(default, int) else floats)[EXTRA + name]
        field[:] = default
        field[: len(params)] = [(p.extra_args or {}).get(name, default) for p in params]

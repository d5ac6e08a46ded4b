"""Tables of removed and refused fields of SamplingParams, and checks of single fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import (
    INT32_MAX,
    check_bool,
    check_float,
    check_int,
    check_options,
    check_strings,
    shown,
)
from jaxllm.params.limits import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_LENGTH,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_SCORED_ROWS,
    MIN_TEMPERATURE,
)

logger = logging.getLogger(__name__)

GONE: Mapping[str, str] = {
    "best_of": "generate n outputs and pick by cumulative_logprob",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "logits_processors": "it was removed from vLLM as well; see logit_bias, bad_words and allowed_token_ids",
    "truncate_prompt_tokens": "pass tokenization_kwargs={'truncate_prompt_tokens': N} to generate",
    "early_stopping": "beam search has its own BeamSearchParams",
    "use_beam_search": "call LLM.beam_search with BeamSearchParams",
    "length_penalty": "beam search has its own BeamSearchParams",
    "use_beam_width": "beam search has its own BeamSearchParams",
}

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "watermarking": ((None, False), "outputs get no watermark"),
    "routed_experts_prompt_start": ((0,), "which experts a token went to is not returned"),
    "trace_decode_token_ids": (
        (None,),
        "outputs are sampled, not prescribed; to score a given text, make it the prompt and ask for prompt_logprobs",
    ),
}
"""Fields that accept only the listed values, with the reason. The first value is the default."""


def refuse_without_meaning(params: Any) -> None:
    """Refuse fields of SamplingParams that have no meaning here."""
    for name, (taken, reason) in REFUSED.items():
        value = getattr(params, name)
        if not any(type(value) is type(each) and value == each for each in taken):
            message = f"{name}={shown(value)} is not supported: {reason}. Leave it at {taken[0]!r}."
            raise VLLMValidationError(message, parameter=name, value=value)


def check_temperature(value: Any) -> float:
    """Return the temperature. A positive one too low for float32 logits is raised, with a warning."""
    temperature = check_float("temperature", value, 0.0, 2.0, below="non-negative")
    if not 0 < temperature < MIN_TEMPERATURE:
        return temperature
    logger.warning(
        "temperature %s is less than %s, which may cause numerical errors nan or inf in tensors. We have maxed it out "
        "to %s.",
        temperature,
        MIN_TEMPERATURE,
        MIN_TEMPERATURE,
    )
    return MIN_TEMPERATURE


def check_bad_words(words: Any) -> list[str]:
    """Return the distinct words, in order."""
    name = "bad_words"
    checked = check_strings(name, [] if words is None else words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    length = sum(map(len, checked))
    if length > MAX_BAD_WORDS_LENGTH:
        message = f"{name} must have at most {MAX_BAD_WORDS_LENGTH} characters together, got {length}."
        raise VLLMValidationError(message, parameter=name, value=length)
    blank = next((word for word in checked if word.isspace()), None)
    if blank is not None:
        message = f"{name} cannot contain words of spaces only, got {shown(blank)}."
        raise VLLMValidationError(message, parameter=name, value=blank)
    return checked


def check_extra_args(extra_args: Any) -> dict[str, Any]:
    """Return a copy as msgpack transports it: lists for tuples, integers of at most 64 bits."""
    name = "extra_args"
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(check_options(name, extra_args)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        wanted = "strings, numbers, lists and dicts, with integers between -2**63 and 2**64 - 1"
        raise VLLMValidationError(
            f"{name} must be a dict of {wanted}: {error}.", parameter=name, value=extra_args
        ) from error


def check_prompt_scores(params: Any) -> None:
    """Check the fields about the prompt's log-probabilities, and decide whether the prefix cache is read."""
    ids = params.prompt_logprob_token_ids
    if ids is not None:
        params.prompt_logprob_token_ids = _check_id_rows("prompt_logprob_token_ids", ids)
    name, start = "prompt_logprob_start", params.prompt_logprob_start
    if start is not None:
        params.prompt_logprob_start = check_int(name, start, 0, INT32_MAX)
        if ids is None:
            message = f"{name} only applies to prompt_logprob_token_ids; give those, or leave it out."
            raise VLLMValidationError(message, parameter=name, value=start)
    name, skip = "skip_reading_prefix_cache", params.skip_reading_prefix_cache
    is_scored = params.prompt_logprobs is not None or ids is not None
    params.skip_reading_prefix_cache = is_scored if skip is None else check_bool(name, skip)
    if is_scored and not params.skip_reading_prefix_cache:
        message = f"{name}=False cannot go with log-probabilities of the prompt: cached tokens have none. Leave it out."
        raise VLLMValidationError(message, parameter=name, value=skip)


def _check_id_rows(name: str, rows: Any) -> list[list[int]]:
    """Return rows of token ids padded with -1 to the longest; the input may contain -1 too."""
    if getattr(rows, "ndim", 0) == 2 and rows.dtype.kind in "iu":
        rows = rows.tolist()
    if not isinstance(rows, (list, tuple)) or not rows or not all(isinstance(row, (list, tuple)) for row in rows):
        message = f"{name} must be a non-empty integer array of shape [num_rows, num_ids], or lists in a list"
        raise VLLMValidationError(f"{message}; got {shown(rows)}.", parameter=name, value=rows)
    width = max(map(len, rows))
    if not 0 < width <= MAX_LOGPROB_TOKEN_IDS or len(rows) > MAX_SCORED_ROWS:
        message = f"{name} must have at most {MAX_SCORED_ROWS} rows, and 1 to {MAX_LOGPROB_TOKEN_IDS} ids in a row"
        raise VLLMValidationError(f"{message}; got {len(rows)} rows, up to {width} ids.", parameter=name, value=width)
    return [[*_check_id_row(name, row), *[-1] * (width - len(row))] for row in rows]


def _check_id_row(name: str, row: Any) -> Sequence[int]:
    # A long prompt has thousands of rows: a call of check_int for each id would take too long.
    if set(map(type, row)) == {int} and min(row) >= -1 and max(row) <= INT32_MAX:
        return row
    return [check_int(name, each, -1, INT32_MAX) for each in row]


def check_logit_bias(biases: Any) -> dict[int, float]:
    """Return {token id: bias}; ids may be numerals, as JSON keys are."""
    name = "logit_bias"
    if not isinstance(biases, Mapping) or len(biases) > MAX_LOGIT_BIASES:
        wanted = f"a dict from token id to bias with at most {MAX_LOGIT_BIASES} entries"
        message = f"{name} must be {wanted}, got {shown(biases)}."
        raise VLLMValidationError(message, parameter=name, value=biases)
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        number = check_float(name, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        checked[check_int(name, token_id, 0, INT32_MAX)] = number
    return checked

"""The limits of `SamplingParams`, and the tables of fields that are gone or not supported yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.validation import INT32_MAX, check_float, check_int

SAMPLING_EPS = 1e-5
"""Temperatures below it mean greedy."""
MIN_TEMPERATURE = 1e-2
"""Random sampling at a lower temperature overflows float32 logits; such a temperature is raised to this one."""

MAX_N = 16_384
MAX_STOP_STRINGS = 256
MAX_STOP_LENGTH = 4_096
MAX_STOP_TOKEN_IDS = 4_096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 4_096
MAX_LOGIT_BIASES = 1_024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_GRAMMAR_LENGTH = 2**20

GONE: Mapping[str, str] = {
    "best_of": "generate n outputs and pick by cumulative_logprob",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "logits_processors": "it was removed from vLLM as well; see logit_bias, bad_words and allowed_token_ids",
    "truncate_prompt_tokens": "pass tokenization_kwargs={'truncation': True, 'max_length': N} to generate",
    "early_stopping": "beam search has its own BeamSearchParams",
    "use_beam_search": "call LLM.beam_search with BeamSearchParams",
    "length_penalty": "beam search has its own BeamSearchParams",
    "use_beam_width": "beam search has its own BeamSearchParams",
}

NOT_SUPPORTED_YET: Mapping[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "spaces_between_special_tokens": True,
    "stream_interval": None,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "routed_experts_prompt_start": 0,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "trace_decode_token_ids": None,
}
"""Fields that only take this value so far; anything else is an error that names the field."""


def check_logit_bias(biases: Any) -> dict[int, float]:
    """Return {token id: bias clamped to [-100, 100]}; ids may be numerals, as JSON keys are."""
    name = "logit_bias"
    if not isinstance(biases, Mapping) or len(biases) > MAX_LOGIT_BIASES:
        message = f"{name} must be a mapping from token id to bias with at most {MAX_LOGIT_BIASES} entries."
        raise VLLMValidationError(message, parameter=name, value=biases)
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        number = check_float(name, bias, -math.inf, math.inf)
        checked[check_int(name, token_id, 0, INT32_MAX)] = min(100.0, max(-100.0, number))
    return checked

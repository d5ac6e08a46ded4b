"""One case per field of `SamplingParams`: a request that uses it among others, and what must come of it.

Each case's request runs as row 0 of a batch of 16; the other rows are `OTHERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm import SamplingParams
from jaxllm.sampling.processors import LogitsState
from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams
from tests.e2e import sampling_checks as checks
from tests.e2e.sampling_checks import ASKED, CHOICES, PROMPT, Check
from tests.e2e.sampling_oracle import OracleRequest
from tests.e2e.tiny_engine import Job
from tests.e2e.tiny_tokenizer import END_THINK, EOS, SPECIALS, THINK, TOOL, ids_of, token_bytes

A, B, C, D = ids_of("abcd")
SPACE_A, SPACE_C = (token_bytes().index(text) for text in (b" a", b" c"))

GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": -1, "max_tokens": 12}
BUSY: dict[str, Any] = {
    "seed": 11,
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.001,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {A: 4.0, 90: -3.0, 200: 6.0},
    "logprobs": -1,
    "max_tokens": 12,
}
"""Other features that each field has to get along with."""
LOOSE = BUSY | {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Settings for cases of masks, which truncation would hide in part."""
SPELLED = BUSY | {"structured_outputs": StructuredOutputsParams(choice=["abcabcabcabc"]), "max_tokens": 14}
"""The text that spelling cases put out, before EOS."""
SCORED = GREEDY | {"prompt_logprobs": -1}


@dataclass(frozen=True)
class Case:
    """A request that uses a field, and what must be true of it."""

    fields: Mapping[str, Any]
    check: Check = checks.nothing_more
    prompt: Sequence[int] = tuple(PROMPT)
    without: Mapping[str, Any] | None = None
    """Arguments of the same request without the feature; None leaves the field out."""
    is_refused: bool = False
    shows_all_logits: bool = True
    """True where the oracle can judge each step."""
    streams: bool = False
    bad_words: Sequence[Sequence[int]] = ()
    """Ids of the fields' bad_words, in each spelling."""
    follows: Callable[[Sequence[int]], set[int]] | None = None
    """A function that returns the tokens which a grammar or a thinking budget allows next."""

    def job(self) -> Job:
        """Return the request."""
        return Job(list(self.prompt), SamplingParams(**self.fields))

    def identity(self, name: str) -> Job:
        """Return the request without the feature."""
        without = {key: value for key, value in self.fields.items() if key != name}
        return Job(list(self.prompt), SamplingParams(**(without if self.without is None else self.without)))

    def oracle_request(self, index: int) -> OracleRequest:
        """Return the oracle's parameters for the output at `index`."""
        params = SamplingParams(**self.fields)
        return OracleRequest(
            prompt=list(self.prompt),
            params=params,
            eos=EOS,
            seed=(params.seed or 0) + index,
            bad_words=self.bad_words,
            follows=self.follows,
            process=tilt_oracle,
            extra_arg=(params.extra_args or {}).get("tilt", 0.0),
        )


def tilt(logits_sv: Array, state: LogitsState) -> Array:
    """Be a custom logits processor that looks at all of its state; without extra_args it changes nothing."""
    ids_v = jnp.arange(logits_sv.shape[1])
    steps_s = 0.1 * state.num_outputs_s + 0.01 * state.positions_s
    pattern_sv = jnp.where(ids_v % 3 > 0, ids_v % 5 + steps_s[:, None], 0.0)
    pattern_sv = pattern_sv + 0.7 * state.output_counts_sv - 0.9 * state.in_prompt_sv
    return logits_sv + state.extra_args["tilt"][:, None] * pattern_sv


tilt.extra_args = {"tilt": 0.0}  # type: ignore[attr-defined]


def tilt_oracle(logits_v: np.ndarray, prompt: Sequence[int], output: Sequence[int], tilt: float) -> np.ndarray:
    """Do what `tilt` does, in numpy."""
    ids_v = np.arange(len(logits_v))
    steps = 0.1 * len(output) + 0.01 * (len(prompt) + len(output))
    pattern_v = np.where(ids_v % 3 > 0, ids_v % 5 + steps, 0.0)
    counts_v = np.bincount(np.asarray(output, int), minlength=len(logits_v))
    return logits_v + tilt * (pattern_v + 0.7 * counts_v - 0.9 * np.isin(ids_v, prompt))


def spells(*choices: str) -> Callable[[Sequence[int]], set[int]]:
    """Return the tokens that may follow an output which must become one of these texts, in any tokens."""
    wanted, tokens = [text.encode() for text in choices], token_bytes()

    def follows(output: Sequence[int]) -> set[int]:
        text = b"".join(tokens[token] for token in output)
        fitting = range(len(SPECIALS), len(tokens))
        beginnings = {i for i in fitting if any(choice.startswith(text + tokens[i]) for choice in wanted)}
        return beginnings | ({EOS} if text in wanted else set())

    return follows


def thinks_for(budget: int) -> Callable[[Sequence[int]], set[int]]:
    """Return the tokens that may follow an output after a prompt that ends in THINK."""

    def follows(output: Sequence[int]) -> set[int]:
        is_free = len(output) < budget or END_THINK in output
        return set(range(len(token_bytes()))) if is_free else {END_THINK}

    return follows


def _spelled(check: Check, *, streams: bool = False, without: Mapping[str, Any] | None = None, **fields: Any) -> Case:
    return Case(SPELLED | fields, check, follows=spells("abcabcabcabc"), streams=streams, without=without)


CASES: dict[str, Case] = {
    "n": Case(BUSY | {"n": 3}, checks.gives_three),
    "presence_penalty": Case(BUSY | {"presence_penalty": 1.7}),
    "frequency_penalty": Case(BUSY | {"frequency_penalty": -1.1}),
    "repetition_penalty": Case(BUSY | {"repetition_penalty": 1.9}),
    "temperature": Case(BUSY | {"temperature": 1.4}),
    "top_p": Case(BUSY | {"top_p": 0.7}),
    "top_k": Case(BUSY | {"top_k": 7}),
    "min_p": Case(BUSY | {"min_p": 0.05, "top_k": 0}),
    "seed": Case(BUSY | {"seed": 2**31 + 5, "temperature": 2.0}),
    "stop": _spelled(checks.ends(4, "stop", "ca", "ab"), stop=["zz", "ca", "bcab"]),
    "stop_token_ids": _spelled(checks.ends(3, "stop", C, "ab"), stop_token_ids=[C, TOOL]),
    "ignore_eos": Case(
        BUSY | {"ignore_eos": True, "allowed_token_ids": [EOS, A], "logit_bias": {EOS: 20.0, A: 20.0}},
        checks.goes_on_after_eos,
    ),
    "max_tokens": Case(BUSY | {"max_tokens": 7}, checks.ends(7, "length")),
    "min_tokens": Case(
        LOOSE
        | {"min_tokens": 5, "allowed_token_ids": [EOS, A, B], "stop_token_ids": [B], "logit_bias": {EOS: 50.0, B: 10.0}}
    ),
    "logprobs": Case(GREEDY | {"logprobs": 5}, checks.shows_the_top, shows_all_logits=False),
    "prompt_logprobs": Case(SCORED, checks.scores_the_prompt),
    "logprob_token_ids": Case(
        {"temperature": 0.0, "max_tokens": 12, "logprob_token_ids": ASKED},
        checks.shows_the_asked,
        shows_all_logits=False,
    ),
    "flat_logprobs": Case(SCORED | {"flat_logprobs": True}, checks.is_flat),
    "detokenize": _spelled(checks.makes_no_text, detokenize=False),
    "skip_special_tokens": Case(
        BUSY | {"skip_special_tokens": False, "allowed_token_ids": [TOOL, A], "logit_bias": {TOOL: 20.0, A: 20.0}},
        checks.shows_special_tokens,
    ),
    "spaces_between_special_tokens": Case(
        BUSY | {"skip_special_tokens": False, "spaces_between_special_tokens": False, "allowed_token_ids": [TOOL]},
        checks.joins_special_tokens,
    ),
    "include_stop_str_in_output": _spelled(
        checks.ends(4, "stop", "ca", "abca"), stop="ca", include_stop_str_in_output=True
    ),
    "output_kind": _spelled(checks.streams_deltas, output_kind=RequestOutputKind.DELTA, streams=True),
    "stream_interval": Case(BUSY | {"stream_interval": 4}, checks.streams_by_fours, streams=True),
    "skip_clone": Case(BUSY | {"skip_clone": True}, checks.is_not_copied),
    "structured_outputs": Case(
        LOOSE | {"structured_outputs": StructuredOutputsParams(choice=CHOICES)}, checks.chose, follows=spells(*CHOICES)
    ),
    "logit_bias": Case(BUSY | {"logit_bias": {EOS: -100.0, A: 7.5, 17: 3.0, 218: -2.0}}),
    "allowed_token_ids": Case(LOOSE | {"allowed_token_ids": [3, A, B, 90, 200, 255]}),
    "extra_args": Case(BUSY | {"extra_args": {"tilt": 0.6}}),
    "routed_experts_prompt_start": Case({"routed_experts_prompt_start": 2}, is_refused=True),
    "bad_words": Case(
        LOOSE | {"bad_words": ["ab", "cc", "d"], "allowed_token_ids": [A, B, C, D, SPACE_A, SPACE_C]},
        bad_words=[[A, B], [SPACE_A, B], [C, C], [SPACE_C, C], [D], [token_bytes().index(b" d")]],
    ),
    "skip_reading_prefix_cache": Case(BUSY | {"skip_reading_prefix_cache": True}, checks.reads_no_cache),
    "thinking_token_budget": Case(
        LOOSE | {"thinking_token_budget": 3, "logit_bias": {END_THINK: -50.0}},
        checks.thought_briefly,
        prompt=[*PROMPT, THINK],
        follows=thinks_for(3),
    ),
    "repetition_detection": _spelled(
        checks.ends(9, "repetition", "repetition_detected", "abcabcabc"),
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3),
    ),
    "prompt_logprob_token_ids": Case(
        SCORED | {"prompt_logprob_token_ids": checks.rows_from(0)}, checks.scores_ids_from(0)
    ),
    "prompt_logprob_start": Case(
        SCORED | {"prompt_logprob_token_ids": checks.rows_from(7), "prompt_logprob_start": 7},
        checks.scores_ids_from(7),
        without=SCORED | {"prompt_logprob_token_ids": checks.rows_from(0)},
    ),
    "trace_decode_token_ids": Case({"trace_decode_token_ids": [5, 6]}, is_refused=True),
    "watermarking": Case({"watermarking": True}, is_refused=True),
    "output_text_buffer_length": _spelled(
        checks.holds_back_two, stop=["zzz"], output_text_buffer_length=7, streams=True, without=SPELLED
    ),
}


def others() -> list[Job]:
    """Return 15 requests that together use all features; sampled ones have seeds."""
    shown = {"logprobs": 3, "max_tokens": 14}
    drawn = shown | {"temperature": 1.2}
    fields: list[dict[str, Any]] = [
        shown | {"temperature": 0.0},
        drawn | {"seed": 1, "top_p": 0.8},
        shown | {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        drawn | {"seed": 2, "repetition_penalty": 1.5, "min_p": 0.02},
        drawn | {"seed": 3, "top_k": 9, "logit_bias": {A: 5.0, B: 5.0}},
        drawn | {"seed": 4, "allowed_token_ids": list(range(60, 200)), "logprobs": -1},
        drawn | {"seed": 5, "allowed_token_ids": [A, B, C, D], "bad_words": ["ab", "dd", "c"]},
        drawn | {"seed": 6, "min_tokens": 6, "allowed_token_ids": [EOS, A, B], "stop_token_ids": [B]},
        shown | {"temperature": 0.0, "prompt_logprobs": 2},
        drawn | {"seed": 7, "structured_outputs": StructuredOutputsParams(regex="[a-f]{6,10}")},
        drawn | {"seed": 8, "structured_outputs": StructuredOutputsParams(json={"type": "integer"}), "min_tokens": 3},
        drawn | {"seed": 9, "extra_args": {"tilt": 0.4}, "frequency_penalty": 0.5},
        shown | {"temperature": 0.0, "logprob_token_ids": ASKED, "flat_logprobs": True, "ignore_eos": True},
        drawn | {"seed": 10, "thinking_token_budget": 4, "skip_special_tokens": False},
        drawn | {"seed": 12, "structured_outputs": StructuredOutputsParams(choice=["abababab"]), "stop": ["bab"]},
    ]
    # Short ones: all must be in before the first has ended.
    prompts = [[30 + i, THINK if "thinking_token_budget" in each else 40 - i] for i, each in enumerate(fields)]
    return [Job(prompt, SamplingParams(**each)) for prompt, each in zip(prompts, fields, strict=True)]

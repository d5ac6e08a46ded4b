"""Requests that must be refused by name (R13), as fields of a completion, in the same way over HTTP and gRPC.

Numbers are the first outside a field's bounds and those outside 32 and 64 bits; lists and texts are empty or one
item too long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

INT64 = range(-(2**63), 2**63)
NO_NUMBERS = (math.nan, math.inf, -math.inf)
VOCAB_SIZE = 256
"""The vocabulary size of the tokenizer that the server's tests share."""


class Bad(NamedTuple):
    """A request to be refused: its fields besides a good prompt, and the parameter that the error names."""

    fields: dict[str, Any]
    parameter: str
    has_json: bool = True
    """Whether JSON can express it."""
    has_message: bool = True
    """Whether a gRPC message can express it."""

    @property
    def name(self) -> str:
        """Return a short name of the case."""
        text = ",".join(f"{name}={value!r}" for name, value in self.fields.items())
        return text if len(text) < 60 else f"{text[:50]}({len(text)})"


INTEGERS = {
    "n": (1, 16_384),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "stream_interval": (1, 2**31 - 1),
    "thinking_token_budget": (-1, 2**31 - 1),
    "truncate_prompt_tokens": (-1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
"""The lowest and highest value of each field."""
FLOATS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 1e3),
}
ID_LISTS = {"stop_token_ids": 4_096, "allowed_token_ids": 300_000, "logprob_token_ids": 128}
"""The maximum number of ids of each field."""
OTHERS = [
    Bad({"prompt": ""}, "prompt"),
    Bad({"prompt": [VOCAB_SIZE]}, "prompt"),
    Bad({"prompt": [-1]}, "prompt"),
    Bad({"prompt": [2**31]}, "prompt"),
    Bad({"prompt": [2**63]}, "prompt", has_message=False),
    Bad({"prompt": [5] * 4_000}, "prompt"),
    Bad({"prompt": []}, "prompt"),
    Bad({"prompt": [[]]}, "prompt", has_message=False),
    Bad({"prompt": [1, "a"]}, "prompt", has_message=False),
    Bad({"prompt": [1, [2]]}, "prompt", has_message=False),
    Bad({"prompt": ["a"] * 1_025}, "prompt", has_message=False),
    Bad({"prompt": 5}, "prompt", has_message=False),
    Bad({"suffix": "x"}, "suffix", has_message=False),
    Bad({"best_of": 2}, "best_of", has_message=False),
    Bad({"guided_json": {}}, "guided_json", has_message=False),
    Bad({"use_beam_search": True}, "use_beam_search", has_message=False),
    Bad({"stream_options": {"include_usage": True}}, "stream_options", has_message=False),
    Bad({"max_tokens": -1, "echo": True}, "max_tokens", has_message=False),
    Bad({"top_p": 0.0}, "top_p"),
    Bad({"stop": ""}, "stop"),
    Bad({"stop": ["a", ""]}, "stop"),
    Bad({"stop": ["a"] * 257}, "stop"),
    Bad({"stop": ["a" * 4_097]}, "stop"),
    Bad({"bad_words": [""]}, "bad_words"),
    Bad({"bad_words": ["a"] * 129}, "bad_words"),
    Bad({"bad_words": ["a" * 4_097]}, "bad_words"),
    Bad({"allowed_token_ids": []}, "allowed_token_ids"),
    Bad({"logit_bias": {"-1": 1.0}}, "logit_bias"),
    Bad({"logit_bias": {str(VOCAB_SIZE): 1.0}}, "logit_bias"),
    Bad({"logit_bias": {str(2**63): 1.0}}, "logit_bias", has_message=False),
    Bad({"logit_bias": {"a": 1.0}}, "logit_bias", has_message=False),
    Bad({"logit_bias": {"5": 1e31}}, "logit_bias"),
    Bad({"logit_bias": {str(i): 1.0 for i in range(1_025)}}, "logit_bias"),
    Bad({"logit_bias": {"5": math.nan}}, "logit_bias", has_json=False),
    Bad({"cache_salt": ""}, "cache_salt"),
    Bad({"truncation_side": ""}, "truncation_side"),
    Bad({"truncation_side": "middle"}, "truncation_side"),
    Bad({"structured_outputs": {}}, "structured_outputs"),
    Bad({"structured_outputs": {"regex": "a", "grammar": 'start: "a"'}}, "structured_outputs"),
    Bad({"structured_outputs": {"regex": ""}}, "structured_outputs"),
    Bad({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    Bad({"structured_outputs": {"regex": "a" * 2**20 + "a"}}, "structured_outputs"),
    Bad({"structured_outputs": {"grammar": "start"}}, "structured_outputs"),
    Bad({"structured_outputs": {"json": "not JSON"}}, "structured_outputs"),
    Bad({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    Bad({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
    Bad({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    Bad({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection"),
    Bad({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection"),
    Bad(
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}}, "repetition_detection"
    ),
    Bad({"vllm_xargs": {"a": math.nan}}, "vllm_xargs", has_json=False),
    Bad({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    Bad({"logprob_token_ids": [5], "echo": True, "max_tokens": 0}, "logprob_token_ids", has_message=False),
    Bad({"n": "two"}, "n", has_message=False),
    Bad({"n": 1.5}, "n", has_message=False),
    Bad({"temperature": "hot"}, "temperature", has_message=False),
    Bad({"stop": [1]}, "stop", has_message=False),
    Bad({"stop_token_ids": ["a"]}, "stop_token_ids", has_message=False),
    Bad({"ignore_eos": "yes"}, "ignore_eos", has_message=False),
]


def bad_requests() -> Iterator[Bad]:
    """Yield all of them."""
    for name, (low, high) in INTEGERS.items():
        for value in sorted({low - 1, high + 1, 2**31, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1}):
            if not low <= value <= high:
                yield Bad({name: value}, name, has_message=value in INT64)
    for name, (low, high) in FLOATS.items():
        for value in (low - 1e-4, high + 1e-4, -1e308, 1e308):
            yield Bad({name: value}, name)
        yield from (Bad({name: value}, name, has_json=False) for value in NO_NUMBERS)
    for name, most in ID_LISTS.items():
        for ids in ([-1], [2**31], [2**63], [5] * (most + 1)):
            yield Bad({name: ids}, name, has_message=ids[0] in INT64)
        yield Bad({name: [VOCAB_SIZE]}, name)
    yield from OTHERS

"""Checks of what must be true of a request that uses a field, beyond the oracle's checks of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm import CompletionOutput, RequestOutput, SamplingParams
from jaxllm.logprobs import FlatLogprobs
from tests.e2e.tiny_engine import CASE
from tests.e2e.tiny_tokenizer import END_THINK, EOS, SPACED, SPECIALS, TOOL, token_bytes
from tests.models.tiny import read_goldens

GOLDEN = read_goldens(CASE)[1]
PROMPT = GOLDEN.prompt.tolist()
ASKED = [9, 200, 31]
CHOICES = ["tell", "tea", "tears", "net", "no"]
"""Several tokens can begin one. Where only one text can follow, llguidance allows no other tokens than usual for it."""
GOLDEN_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Evidence:
    """The outputs of one request: with raw logits, with processed ones, and if the case streams, step by step."""

    params: SamplingParams
    raw: RequestOutput
    processed: RequestOutput
    stream: Sequence[RequestOutput]
    plain: RequestOutput
    """Raw logits of the same prompt with plain greedy sampling, all of them."""

    @property
    def output(self) -> CompletionOutput:
        """Return the first output of those with raw logits."""
        return self.raw.outputs[0]

    @property
    def texts(self) -> list[str]:
        """Return the text that each streamed output shows."""
        return [output.outputs[0].text for output in self.stream]


type Check = Callable[[Evidence], None]


def nothing_more(evidence: Evidence) -> None:
    """Check nothing: the oracle alone judges these fields."""
    del evidence


def text_of(tokens: Sequence[int], tool: str = "") -> str:
    """Return the text of tokens, special ones left out but for TOOL."""
    strings = [""] * len(SPECIALS) + [token.decode(errors="replace") for token in token_bytes()[len(SPECIALS) :]]
    strings[TOOL] = tool
    return "".join(strings[token] for token in tokens)


def ends(tokens: int, finish_reason: str, stop_reason: int | str | None = None, text: str | None = None) -> Check:
    """Check the number of tokens, how the output ended, and its text."""

    def check(evidence: Evidence) -> None:
        output = evidence.output
        assert len(output.token_ids) == tokens
        assert (output.finish_reason, output.stop_reason) == (finish_reason, stop_reason)
        assert text is None or output.text == text

    return check


def gives_three(evidence: Evidence) -> None:
    """Check that there are three outputs, all different; the oracle has judged each by its own seed."""
    assert [output.index for output in evidence.raw.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in evidence.raw.outputs}) == 3


def goes_on_after_eos(evidence: Evidence) -> None:
    """Check that EOS is in the output but does not end it."""
    assert EOS in evidence.output.token_ids[:-1]
    ends(12, "length")(evidence)


def chose(evidence: Evidence) -> None:
    """Check that the text is one of the choices, and that raw logits, too, are taken after the grammar's mask."""
    assert evidence.output.text in CHOICES
    assert evidence.output.finish_reason == "stop"
    *before, last = map(logits_of, evidence.output.logprobs or ())
    assert all(0 < np.isfinite(logits_v).sum() < 50 for logits_v in before)
    assert np.flatnonzero(np.isfinite(last)).tolist() == [EOS]


def thought_briefly(evidence: Evidence) -> None:
    """Check that the reasoning ended after three tokens."""
    assert list(evidence.output.token_ids).index(END_THINK) == 3


def logits_of(position: Mapping[int, Any] | None) -> np.ndarray:
    """Return float64 [v] of a position that shows the whole vocabulary."""
    assert position is not None
    assert len(position) == len(token_bytes())
    return np.array([position[i].logprob for i in range(len(position))])


def log_softmax(logits_v: np.ndarray) -> np.ndarray:
    """Return log-probabilities."""
    shifted_v = logits_v - logits_v.max()
    return shifted_v - np.log(np.exp(shifted_v).sum())


def shows_the_top(evidence: Evidence) -> None:
    """Check that each position shows its token and the five largest logits with their ranks."""
    shown, full = evidence.output.logprobs, evidence.plain.outputs[0].logprobs
    assert shown is not None
    assert full is not None
    for token, position, whole in zip(evidence.output.token_ids, shown, full, strict=True):
        logits_v = logits_of(whole)
        top = np.argsort(-logits_v, kind="stable")[:5].tolist()
        assert list(position) == list(dict.fromkeys([token, *top]))
        for token_id, entry in position.items():
            assert entry.logprob == logits_v[token_id]
            assert entry.rank == (logits_v >= logits_v[token_id]).sum()
            assert entry.decoded_token is not None


def shows_the_asked(evidence: Evidence) -> None:
    """Check that each position shows its token and the ids that were asked for."""
    shown, full = evidence.output.logprobs, evidence.plain.outputs[0].logprobs
    assert shown is not None
    assert full is not None
    for token, position, whole in zip(evidence.output.token_ids, shown, full, strict=True):
        assert set(position) >= {token, *ASKED}
        assert all(entry.logprob == whole[token_id].logprob for token_id, entry in position.items())


def scores_the_prompt(evidence: Evidence) -> None:
    """Check each prompt position's logits against HF's distribution there, and the token's own place in them."""
    shown = evidence.raw.prompt_logprobs
    assert shown is not None
    assert GOLDEN.prompt_logprobs is not None
    assert len(shown) == len(PROMPT)
    assert shown[0] is None
    for token, position, golden_v in zip(PROMPT[1:], shown[1:], GOLDEN.prompt_logprobs, strict=False):
        logits_v = logits_of(position)
        np.testing.assert_allclose(log_softmax(logits_v), golden_v, atol=GOLDEN_TOLERANCE)
        assert position is not None
        assert next(iter(position)) == token
        assert position[token].rank == (logits_v >= logits_v[token]).sum()


def rows_from(start: int) -> list[list[int]]:
    """Return a row of ids for each prompt position after `start`, of one id up to all those asked for."""
    return [ASKED[: 1 + position % len(ASKED)] for position in range(start + 1, len(PROMPT))]


def scores_ids_from(start: int) -> Check:
    """Check the matrix of the asked ids' logits over the prompt, from the position after `start` on."""

    def check(evidence: Evidence) -> None:
        scores_the_prompt(evidence)
        shown, whole = evidence.raw.prompt_token_id_logprobs, evidence.raw.prompt_logprobs
        assert shown is not None
        assert whole is not None
        values = [[entry[i].logprob for i in ASKED] for entry in whole[start + 1 :] if entry is not None]
        nothing = [-math.inf] * len(ASKED)
        rows = zip(values, rows_from(start), strict=True)
        assert shown.tolist() == [(row[: len(ids)] + nothing)[: len(ASKED)] for row, ids in rows]

    return check


def is_flat(evidence: Evidence) -> None:
    """Check that the log-probabilities come flat, the prompt's too, and say the same."""
    for output in (evidence.raw, evidence.processed):
        assert isinstance(output.outputs[0].logprobs, FlatLogprobs)
        assert isinstance(output.prompt_logprobs, FlatLogprobs)
        assert len(output.prompt_logprobs) == len(PROMPT)
    assert list(evidence.output.logprobs or ()) == evidence.plain.outputs[0].logprobs


def makes_no_text(evidence: Evidence) -> None:
    """Check that nothing is made into text."""
    assert evidence.output.text == ""
    assert all(entry.decoded_token is None for entry in (evidence.output.logprobs or [{}])[0].values())


def shows_special_tokens(evidence: Evidence) -> None:
    """Check that special tokens are in the text, each with its space."""
    assert TOOL in evidence.output.token_ids
    assert evidence.output.text == text_of(evidence.output.token_ids, SPACED)


def joins_special_tokens(evidence: Evidence) -> None:
    """Check that of neighbouring special tokens only the first has a space."""
    assert list(evidence.output.token_ids) == [TOOL] * 12
    assert evidence.output.text == SPACED + SPACED.strip() * 11


def streams_deltas(evidence: Evidence) -> None:
    """Check that each output holds what is new, and all together everything."""
    parts = [output.outputs[0] for output in evidence.stream]
    assert [token for part in parts for token in part.token_ids] == list(evidence.output.token_ids)
    assert "".join(evidence.texts) == evidence.output.text
    assert [position for part in parts for position in part.logprobs or ()] == evidence.output.logprobs
    assert [output.finished for output in evidence.stream] == [False] * (len(parts) - 1) + [True]


def streams_by_fours(evidence: Evidence) -> None:
    """Check that outputs come at the first token, then at every fourth."""
    assert [len(output.outputs[0].token_ids) for output in evidence.stream] == [1, 5, 9, 12]


def holds_back_two(evidence: Evidence) -> None:
    """Check that the last two characters are held back, since a stop string may start there, whatever was given."""
    assert evidence.params.output_text_buffer_length == 2
    lengths = [len(output.outputs[0].token_ids) for output in evidence.stream]
    *before, last = evidence.texts
    assert before == ["abcabcabcabc"[: max(0, length - 2)] for length in lengths[:-1]]
    assert last == "abcabcabcabc"


def is_not_copied(evidence: Evidence) -> None:
    """Check that a clone is the object itself, and that the engine wrote nothing into it."""
    assert evidence.params.clone() is evidence.params
    assert evidence.params.eos_token_id is None
    assert evidence.params.stop_token_ids == []


def reads_no_cache(evidence: Evidence) -> None:
    """Check that no token came from the prefix cache, which holds two blocks of the prompt."""
    assert evidence.raw.num_cached_tokens == evidence.processed.num_cached_tokens == 0

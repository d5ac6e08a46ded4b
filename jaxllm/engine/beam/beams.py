"""Choose the beams that a search goes on with and those that it returns, by vLLM's rules, without an engine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxllm.logprobs import Logprob


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that grows during a search."""

    token_ids: list[int]
    """The generated tokens, without the prompt's."""
    cum_logprob: float
    logprobs: list[Mapping[int, Logprob]]
    parent: int
    """The index of its parent among the live beams of the step before."""
    finish_reason: str | None = None
    """How the beam ended: "stop", "length" or "abort"; None while it is live."""


class Step(NamedTuple):
    """The log-probabilities of the tokens that may follow one live beam."""

    logprobs: Mapping[int, Logprob]
    token_ids: Collection[int]
    """The ids in `logprobs` that may follow; all of them without a grammar."""


class BeamSearch:
    """Searches for one prompt: takes log-probabilities, and chooses the beams to go on with.

    As in vLLM, a score is the sum of the log-probabilities divided by the length of the whole sequence, prompt
    included and a last end of sequence not counted, to the power of the length penalty; and every end of sequence
    among the candidates completes a sequence. Hugging Face divides by the generated tokens alone and looks for ends
    among the best candidates only: both find the same beams where none of them ends.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        width: int,
        max_tokens: int,
        length_penalty: float,
        end_id: int | None,
        *,
        ignore_eos: bool = False,
    ) -> None:
        """Search for sequences that `end_id` ends, unless there is none or `ignore_eos`."""
        self.live = [Beam([], 0.0, [], 0)]
        """The beams to go on with, best first; none when the search has ended."""
        self.complete: list[Beam] = []
        """The best complete sequences so far, best first."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_id = end_id
        self._stops = end_id is not None and not ignore_eos

    def advance(self, steps: Sequence[Step | None]) -> None:
        """Take what each live beam's request gave, and do one step; None completes a beam that nothing can follow."""
        self._num_tokens += 1
        before = self.live
        complete = [_ended(before[i], "stop") for i, step in enumerate(steps) if step is None and before[i].token_ids]
        ends = (each for each in self._candidates(steps) if self._stops and each[2] == self._end_id)
        rest = (each for each in self._candidates(steps) if not self._stops or each[2] != self._end_id)
        complete += [self._grow(each, steps, "stop") for each in heapq.nlargest(self._width, ends, key=_first)]
        is_last = self._num_tokens == self._max_tokens
        best = heapq.nlargest(self._width, rest, key=_first)
        self.live = [self._grow(each, steps, "length" if is_last else None) for each in best]
        self._keep(complete + (self.live if is_last else []))
        if is_last or not self._can_improve():
            self.live = []

    def abort(self) -> None:
        """End the search: the live beams count as complete."""
        self._keep([_ended(beam, "abort") for beam in self.live])
        self.live = []

    def _candidates(self, steps: Sequence[Step | None]) -> Iterator[tuple[float, int, int, float]]:
        """Yield (score, parent, token id, cumulative log-probability) of each continuation, likelier parents first."""
        length = self._num_prompt_tokens + self._num_tokens
        for parent, (beam, step) in enumerate(zip(self.live, steps, strict=True)):
            if step is None:
                continue
            for token_id in step.token_ids:
                total = beam.cum_logprob + step.logprobs[token_id].logprob
                if total > -math.inf:
                    yield self._score(total, length - (token_id == self._end_id)), parent, token_id, total

    def _grow(
        self, candidate: tuple[float, int, int, float], steps: Sequence[Step | None], finish_reason: str | None
    ) -> Beam:
        _, parent, token_id, total = candidate
        before, step = self.live[parent], steps[parent]
        logprobs = [*before.logprobs, *([] if step is None else [step.logprobs])]
        return Beam([*before.token_ids, token_id], total, logprobs, parent, finish_reason)

    def _keep(self, complete: list[Beam]) -> None:
        """Add complete sequences, and keep the best `width` of all."""
        self.complete = heapq.nlargest(self._width, self.complete + complete, key=self._score_of)

    def _score_of(self, beam: Beam) -> float:
        ends = bool(beam.token_ids) and beam.token_ids[-1] == self._end_id
        return self._score(beam.cum_logprob, self._num_prompt_tokens + len(beam.token_ids) - ends)

    def _score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / max(length, 1) ** self._length_penalty

    def _can_improve(self) -> bool:
        """Return whether a live beam can still be among the best: more tokens only lower a sum of log-probabilities."""
        if len(self.complete) < self._width or not self.live:
            return True
        lengths = self._num_tokens, self._max_tokens
        best = max(beam.cum_logprob for beam in self.live)
        bound = max(self._score(best, self._num_prompt_tokens + length) for length in lengths)
        return bound > self._score_of(self.complete[-1])


def _ended(beam: Beam, finish_reason: str) -> Beam:
    return Beam(beam.token_ids, beam.cum_logprob, beam.logprobs, beam.parent, finish_reason)


def _first(candidate: tuple[float, *tuple[Any, ...]]) -> float:
    return candidate[0]

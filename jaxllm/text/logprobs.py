"""Convert the log-probabilities of steps to `Logprob`s by token id at each position, with texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.core_messages import PromptLogprobs as ScoredTokens
from jaxllm.core_messages import TokenLogprobs
from jaxllm.logprobs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import LONGEST_CHARACTER, Tokenizer

if TYPE_CHECKING:
    import numpy as np


class _TokenTexts:
    """Decodes the tokens of successive positions, where the position's own token comes first."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Decode to None without a tokenizer."""
        self._tokenizer = tokenizer
        self._before: deque[int] = deque(maxlen=LONGEST_CHARACTER)

    def at(self, token_ids: Sequence[int]) -> Sequence[str | None]:
        """Return the texts of the next position's tokens in the context of the positions before."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        strings = self._tokenizer.token_strings(token_ids, self._before)
        self._before.append(token_ids[0])
        return strings


class LogprobsCollector:
    """Collects a sequence's log-probabilities, or its logits in the logits modes."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        """Show tokens as text if there is a tokenizer."""
        self.cumulative = 0.0
        self._positions: SampleLogprobs = FlatLogprobs() if params.flat_logprobs else []
        self._texts = _TokenTexts(tokenizer)

    def append(self, position: TokenLogprobs) -> None:
        """Add one position."""
        self.cumulative += position.logprobs[0]
        _append(self._positions, position, self._texts)

    def copy(self) -> SampleLogprobs:
        """Return the positions so far."""
        return self._positions[:]

    def take(self) -> SampleLogprobs:
        """Return the positions so far and forget them."""
        taken = self._positions
        self._positions = FlatLogprobs() if isinstance(taken, FlatLogprobs) else []
        return taken


class PromptCollector:
    """Collects the log-probabilities of a prompt's tokens by position, since a preempted request reports some again."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, tokenizer: Tokenizer | None) -> None:
        self._is_flat = params.flat_logprobs
        self._wants_top = params.prompt_logprobs is not None
        self._num_asked = len(params.prompt_logprob_token_ids[0]) if params.prompt_logprob_token_ids else 0
        self._asked_start = (params.prompt_logprob_start or 0) + 1
        self._first = params.first_scored_position or 1
        self._tokenizer = tokenizer
        self._scored: list[TokenLogprobs | None] = [None] * num_prompt_tokens
        self._complete: tuple[PromptLogprobs | None, np.ndarray | None] | None = None
        self._is_given = False

    def add(self, scored: ScoredTokens) -> None:
        """Store a step's scores."""
        self._scored[scored.start : scored.start + len(scored.positions)] = scored.positions

    def show(self, output: RequestOutput, *, delta: bool) -> None:
        """Add the log-probabilities to an output; with deltas only once, when all are known."""
        is_complete = None not in self._scored[self._first :]
        if self._is_given or (delta and not is_complete and not output.finished):
            output.prompt_logprobs = self._empty() if self._wants_top else None
            return
        both = self._complete or (self._logprobs(), self._asked())
        self._complete = both if is_complete else None
        output.prompt_logprobs, output.prompt_token_id_logprobs = both
        self._is_given = delta

    def _empty(self) -> PromptLogprobs:
        return FlatLogprobs() if self._is_flat else []

    def _logprobs(self) -> PromptLogprobs | None:
        """Return one entry per prompt token, None where unknown, as at the first; None if not requested."""
        if not self._wants_top:
            return None
        positions, texts = self._empty(), _TokenTexts(self._tokenizer)
        for index, position in enumerate(self._scored):
            if position is None:
                positions.append(None)
                continue
            end = len(position.token_ids) - (self._num_asked if index >= self._asked_start else 0)
            shown = TokenLogprobs(position.token_ids[:end], position.logprobs[:end], position.rank)
            _append(positions, shown, texts)
        return positions

    def _asked(self) -> np.ndarray | None:
        """Return the values at prompt_logprob_token_ids, [rows, ids] float32, -inf where unknown; None if unset."""
        if not self._num_asked:
            return None
        import numpy as np

        unknown = [-np.inf] * self._num_asked
        rows = [
            unknown if position is None else position.logprobs[-self._num_asked :]
            for position in self._scored[self._asked_start :]
        ]
        return np.array(rows, np.float32).reshape(len(rows), self._num_asked)


def _append(positions: SampleLogprobs | PromptLogprobs, position: TokenLogprobs, texts: _TokenTexts) -> None:
    """Add one position. Its own token comes first; if the others include it, its rank is its index there."""
    token_ids, values = position.token_ids, position.logprobs
    ranks, strings = (position.rank, *range(1, len(token_ids))), texts.at(token_ids)
    if isinstance(positions, FlatLogprobs):
        positions.append_fast(token_ids, values, ranks, strings)
    else:
        positions.append(dict(zip(token_ids, map(Logprob, values, ranks, strings), strict=True)))

"""Log-probabilities as users see them: per position a dict from token id to `Logprob`."""

from __future__ import annotations

from jaxllm.engine.messages import TokenLogprobs
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import Logprob


class LogprobsCollector:
    """One sequence's log-probabilities: at each position the sampled token and the `num_logprobs` most likely."""

    def __init__(self, num_logprobs: int, tokenizer: Tokenizer | None) -> None:
        """Take num_logprobs as in SamplingParams; -1 keeps all that come."""
        self.positions: list[dict[int, Logprob]] = []
        self.cumulative = 0.0
        self._num_kept = None if num_logprobs < 0 else num_logprobs + 1
        self._tokenizer = tokenizer

    def append(self, position: TokenLogprobs) -> None:
        """Add one position; the sampled token comes first, also when it is among the most likely."""
        token_ids, values = position.token_ids[: self._num_kept], position.logprobs[: self._num_kept]
        decoded = self._tokenizer.token_string if self._tokenizer is not None else _no_string
        self.cumulative += values[0]
        entries = {token_ids[0]: Logprob(values[0], position.rank, decoded(token_ids[0]))}
        for rank in range(1, len(token_ids)):
            token_id = token_ids[rank]
            entries[token_id] = Logprob(values[rank], rank, decoded(token_id))
        self.positions.append(entries)


def _no_string(token_id: int) -> None:
    del token_id

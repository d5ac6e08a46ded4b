"""Whether blocks come sooner from a tier than by computing, as far as past fetches and steps tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxllm.scheduling.prompts.step_times import StepTimes


class Part(NamedTuple):
    """A part of a fetch: to read a holder's blocks from files to the host, or to copy them to the device."""

    holder: int
    reads_files: bool


class PartTime(NamedTuple):
    """The measured time of a part of a fetch."""

    part: Part
    num_blocks: int
    seconds: float


class FetchTimes:
    """Compare the measured times of fetches with those of steps."""

    def __init__(self, steps: StepTimes, most_tokens: int) -> None:
        """Compare with `steps` of at most `most_tokens` tokens."""
        self._steps, self._most_tokens = steps, most_tokens
        self._parts: defaultdict[Part, StepTimes] = defaultdict(StepTimes)
        """By numbers of blocks, where `steps` are by numbers of tokens."""
        self.most_refused = 64
        """The fetches refused before one is made all the same, since rates change; with 0 all are made."""
        self.num_refused = 0
        """The fetches that were refused, ever."""
        self._num_since = 0
        """The number of refusals since a fetch was made all the same."""

    def record(self, times: Iterable[PartTime]) -> None:
        """Take in how long the parts of a fetch took."""
        for part, num_blocks, seconds in times:
            self._parts[part].record(num_blocks, seconds)

    def pays(self, blocks: Mapping[Part, int], num_tokens: int, num_left: int) -> bool:
        """Return whether to fetch `num_tokens` tokens of a request rather than compute them before its last `num_left`.

        `blocks` has the number of blocks of each part of the fetch. It pays if it is expected to take less time than
        these tokens add to the request's steps, or if one of the two is not known. Both a fetch and a step may wait for
        others of their kind, which is left out.
        """
        fetching = [self._parts[part].seconds(number) for part, number in blocks.items()]
        both, rest = self._computing(num_tokens + num_left), self._computing(num_left)
        if None in fetching or both is None or rest is None or sum(filter(None, fetching)) < both - rest:
            return True
        if self._num_since >= self.most_refused:
            self._num_since = 0
            for part in blocks:
                del self._parts[part]
            return True
        self._num_since += 1
        self.num_refused += 1
        return False

    def _computing(self, num_tokens: int) -> float | None:
        """Return the seconds of the steps that compute some tokens; None if nothing is known."""
        num_full, rest = divmod(num_tokens, self._most_tokens)
        full, last = self._steps.seconds(self._most_tokens), self._steps.seconds(rest) if rest else 0.0
        return None if full is None or last is None else num_full * full + last

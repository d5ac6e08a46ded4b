"""The times of steps by their numbers of tokens, learned from the steps that ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median_low

_NUM_KEPT = 9
"""The measurements of a size that count: few, since a step's time changes as contexts grow."""
_MOST_STEPS = 256
"""The steps after which a measurement is forgotten."""
_MUCH_FASTER = 0.7
"""A step in this share of its size's time shows that contexts are shorter now."""
_MUCH_SLOWER = 2.0
"""A size's first step that takes this many times as long as expected may be a hiccup: it counts if the next does too.
"""


@dataclass(slots=True)
class _Size:
    """The measurements of steps of one size."""

    seconds: float = 0.0
    """The median of the latest times, the lower one of two."""
    measured: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    step: int = 0
    """The number of the last step of this size."""


class StepTimes:
    """Medians of measured times by the number of tokens, and estimates for sizes without any.

    More tokens never take less time: where two sizes disagree, the newer measurement counts. A size without any takes
    more than the next smaller one, in proportion, but at most the time of the next larger one. A device that pads steps
    takes as long for each size of a bucket, and so the largest of them is as good as the others.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._doubted: set[int] = set()
        """The sizes without measurements whose last step took much longer than expected."""
        self._num_steps = 0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Take in that a step of `num_tokens` tokens took `seconds` seconds."""
        size = round_size(num_tokens)
        self._num_steps += 1
        expected = None if size in self._sizes or size in self._doubted else self.seconds(num_tokens)
        if expected is not None and seconds > _MUCH_SLOWER * expected:
            self._doubted.add(size)
            return
        self._doubted.discard(size)
        times = self._sizes.setdefault(size, _Size())
        if seconds < _MUCH_FASTER * times.seconds:
            self._sizes = {other: kept for other, kept in self._sizes.items() if other < size}
            times = self._sizes[size] = _Size()
        times.measured.append(seconds)
        times.seconds, times.step = median_low(times.measured), self._num_steps

    def seconds(self, num_tokens: int) -> float | None:
        """Return the seconds that a step of `num_tokens` tokens is expected to take; None if nothing is known."""
        size, known = round_size(num_tokens), self._known()
        if size in known:
            return _corrected(size, known)
        below = max((other for other in known if other < size), default=None)
        above = min((other for other in known if other > size), default=None)
        bounds = [] if below is None else [_corrected(below, known) * size / below]
        bounds += [] if above is None else [_corrected(above, known)]
        return min(bounds, default=None)

    def least_seconds(self, num_tokens: int) -> float:
        """Return the seconds that a step of `num_tokens` tokens takes at least; old measurements count too."""
        size = round_size(num_tokens)
        if size in self._sizes:
            return _corrected(size, self._sizes)
        bounds = [times.seconds * min(1.0, size / other) for other, times in self._known().items()]
        return max(bounds, default=0.0)

    def share_of_token(self, num_tokens: int, most: int) -> float | None:
        """Return the time that each token more adds, as a share of that of a step of `num_tokens` tokens.

        It is the mean up to the largest measured step of at most `most` tokens; None if no larger one is measured.
        """
        known = self._known()
        size, largest = round_size(num_tokens), max((other for other in known if other <= most), default=0)
        if size not in known or largest <= size:
            return None
        seconds = _corrected(size, known)
        return max(0.0, _corrected(largest, known) - seconds) / seconds / (largest - size) if seconds else None

    def most_tokens(self, seconds: float, least: int, most: int) -> int:
        """Return the most tokens, from `least` to `most`, of a step that is expected to take at most `seconds`.

        It is `least` if all take longer, else the largest number whose time is kept as one.
        """
        sizes = list(_range(least, most))
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            expected = self.seconds(sizes[middle])
            if expected is None or expected <= seconds:
                low = middle
            else:
                high = middle - 1
        return sizes[low]

    def _known(self) -> dict[int, _Size]:
        oldest = self._num_steps - _MOST_STEPS
        return {size: times for size, times in self._sizes.items() if times.step > oldest}


def _corrected(size: int, known: dict[int, _Size]) -> float:
    """Return the time of a size that has measurements, by its own and by newer ones of other sizes."""
    times = known[size]
    newer = [(other, kept.seconds) for other, kept in known.items() if kept.step > times.step]
    at_least = max((seconds for other, seconds in newer if other < size), default=0.0)
    at_most = min((seconds for other, seconds in newer if other > size), default=times.seconds)
    return max(at_least, min(times.seconds, at_most))


def round_size(num_tokens: int) -> int:
    """Round a number of tokens up to a size that times are kept for: four from each power of two to the next."""
    shift = max(0, (num_tokens - 1).bit_length() - 3)
    return -(-num_tokens >> shift) << shift


def _range(least: int, most: int) -> Iterator[int]:
    """Yield `least`, the sizes between it and `most`, and `most`."""
    size = least
    while size < most:
        yield size
        size = round_size(size + 1)
    yield max(least, most)

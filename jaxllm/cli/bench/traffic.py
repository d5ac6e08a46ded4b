"""The times at which a benchmark sends requests: all at once, at a rate, or at a rate that grows."""

from __future__ import annotations

import dataclasses
import math
from random import Random

from jaxllm.exceptions import VLLMValidationError

STRATEGIES = ("linear", "exponential")


@dataclasses.dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that grows from one number of requests per second to another over a run."""

    strategy: str
    start: float
    end: float

    def __post_init__(self) -> None:
        """Raise VLLMValidationError for impossible rates."""
        low = 0.0 if self.strategy == "linear" else 1e-9
        for flag, value in (("ramp_up_start_rps", self.start), ("ramp_up_end_rps", self.end)):
            if not low <= value < math.inf:
                wanted = "0 or more" if self.strategy == "linear" else "above 0"
                message = f"{flag}={value:g} must be {wanted} for a {self.strategy} ramp."
                raise VLLMValidationError(message, parameter=flag, value=value)
        if self.start >= self.end:
            message = f"ramp_up_start_rps={self.start:g} must be less than ramp_up_end_rps={self.end:g}."
            raise VLLMValidationError(message, parameter="ramp_up_start_rps", value=self.start)

    def rate(self, progress: float) -> float:
        """Return the requests per second after a fraction of all requests, from 0 to 1."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def send_times(num: int, rate: float, burstiness: float, random: Random, ramp: Ramp | None = None) -> list[float]:
    """Return the time of each request, in seconds after the first one.

    Gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is more bursty. Without
    a ramp they are scaled to `num / rate` seconds in total, so that the rate is exact; an infinite rate sends all at
    once.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * num
    times, now = [0.0], 0.0
    for i in range(1, num):
        # A ramp may begin at 0 requests per second, which would never send any: a request comes at its gap's end.
        current = rate if ramp is None else ramp.rate(i / (num - 1))
        now += random.gammavariate(burstiness, 1 / (current * burstiness))
        times.append(now)
    if ramp is None and now > 0:
        times = [each * ((num - 1) / rate) / now for each in times]
    return times

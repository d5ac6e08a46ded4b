"""The tokens of prompts in a step: how many, so that streams do not wait long for it, and whose."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.prompts.step_times import StepTimes
from jaxllm.scheduling.request import Request

_LEAST_TOKENS = 8
"""The tokens of prompts that a step may have however long it takes: every prompt comes to its end."""
_FIRST_SHARE = 4
"""The first prompt in line is sure of a step's prompt tokens divided by this."""


class PromptShares:
    """Decide how many tokens of prompts a step may have, and how prompts share them."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        self._target, self._most = config.step_target, config.max_num_batched_tokens
        self._times = times
        self.short_prompts_pass = config.short_prompts_pass and config.policy == "fcfs"
        """Whether prompts share; otherwise the first in line takes all that it needs."""

    def most_tokens(self, num_streams: int) -> int | None:
        """Return the most tokens of prompts beside the next tokens of `num_streams` streams; None for no such limit."""
        if self._target is None or not num_streams:
            return None
        seconds = max(self._target.seconds, self._target.by_decodes * self._times.least_seconds(num_streams))
        return self._times.most_tokens(seconds, num_streams + _LEAST_TOKENS, self._most) - num_streams


def share_out(num_tokens: int, prompts: Iterable[tuple[int, Request]]) -> dict[Request, int]:
    """Share a step's tokens among prompts, which come with the tokens that they lack.

    The first in line gets a quarter, or all that it lacks; then the shortest come first.
    """
    prompts = sorted(prompts, key=lambda prompt: (prompt[0], prompt[1].order))
    num_missing, first = min(prompts, key=lambda prompt: prompt[1].order)
    shares = {first: min(num_missing, -(-num_tokens // _FIRST_SHARE))}
    num_left = num_tokens - shares[first]
    for num_missing, request in prompts:
        num_more = min(num_missing - shares.get(request, 0), num_left)
        shares[request] = shares.get(request, 0) + num_more
        num_left -= num_more
    return shares

"""The tokens of prompts in a step: how many, so that streams do not wait long for it, and whose."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.prompts.step_times import StepTimes
from jaxllm.scheduling.request import Request

_LEAST_TOKENS = 4
"""The tokens of prompts that a step may have however long it takes: every prompt comes to its end."""
_PLAIN_EVERY = 32
"""One in this many steps beside streams goes without prompts, where the time of such steps bounds the others'."""
FIRST_SHARE = 4
"""The first prompt in line is sure of a step's prompt tokens divided by this."""


type Prompt = tuple[int, Request]
"""A request with the number of tokens that it lacks."""


def order_of_prompt(prompt: Prompt) -> tuple[float, ...]:
    """Return a prompt's place in line."""
    return prompt[1].order


class PromptShares:
    """Decide how many tokens of prompts a step may have, and how prompts share them."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        self._target, self._most = config.step_target, config.max_num_batched_tokens
        self._times = times
        self._threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self.short_prompts_pass = config.short_prompts_pass and config.policy == "fcfs"
        """Whether prompts share; otherwise the first in line takes all that it needs."""
        self._num_mixed = 0
        """The steps with streams and prompts since the last one that left the prompts out."""

    def leaves_prompts_out(self, num_streams: int) -> bool:
        """Return whether a step of `num_streams` streams leaves the prompts in line out, and count it.

        Its time tells how long streams alone take. Without such steps, a slow moment before a long prompt would decide
        how much of it steps have until its end.
        """
        target = self._target
        if target is None or target.by_decodes * self._times.least_seconds(num_streams) <= target.seconds:
            return False
        self._num_mixed = (self._num_mixed + 1) % _PLAIN_EVERY
        return not self._num_mixed

    def most_tokens(self, num_streams: int, num_prompts: int, *, are_beside: bool = True) -> int | None:
        """Return the most tokens of prompts in a step while `num_streams` streams run; None for no such limit.

        `num_prompts` prompts are read, or could be. The streams' next tokens are in the same step, if they are beside
        the prompts.
        """
        target = self._target
        if target is None or not num_streams:
            return None
        factor = max(1.0, target.by_prompts * num_prompts / num_streams)
        seconds = max(target.seconds, factor * target.by_decodes * self._times.least_seconds(num_streams))
        num_beside = num_streams if are_beside else 0
        return self._times.most_tokens(seconds, num_beside + _LEAST_TOKENS, self._most) - num_beside

    def share_out(self, num_tokens: int, prompts: Iterable[Prompt]) -> dict[Request, int]:
        """Share a step's tokens among prompts.

        The first in line gets a quarter, or all that it lacks; then the shortest come first.
        """
        prompts = sorted(prompts, key=lambda prompt: (prompt[0], prompt[1].order))
        num_missing, first = min(prompts, key=order_of_prompt)
        shares = {first: self.sure_of(num_missing, num_tokens)}
        num_left = num_tokens - shares[first]
        for num_missing, request in prompts:
            share = shares.get(request, 0)
            num_more = min(min(num_missing, self._threshold) - share, num_left)
            shares[request] = share + num_more
            num_left -= num_more
        return shares

    def sure_of(self, num_missing: int, num_tokens: int) -> int:
        """Return the part of a step's tokens that the first in line is sure of, if it lacks `num_missing`."""
        return min(num_missing, self._threshold, -(-num_tokens // FIRST_SHARE))

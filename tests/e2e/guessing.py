"""Record what draft heads guess, or replace their guesses by right ones."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

from jaxllm.scheduling.draft_steps import DraftPlan
from jaxllm.scheduling.scheduler import Scheduler
from jaxllm.speculation.guesses import ModelGuesses
from tests.models.heads import HEADS

MOST = 4
"""The number of guesses per step, as in the goldens."""


def head_config(case: str) -> dict[str, Any]:
    """Return the `speculative_config` of a case."""
    method = {"method": "mtp"} if case.startswith("mtp") else {"method": "eagle3", "model": str(HEADS / case)}
    return method | {"num_speculative_tokens": MOST}


class Guesses:
    """Records what an engine's head guesses, and may replace it by guesses that are mostly right."""

    def __init__(self, scheduler: Scheduler) -> None:
        speculation = scheduler._speculation
        assert speculation is not None
        self.speculation, self._take = speculation, speculation.take_guesses
        speculation._cost = lambda num_rows: 0.0  # they are always worth it
        speculation.take_guesses = self.take
        self.answers: dict[tuple[int, ...], list[list[int]]] = {}
        """The whole answers to prompts."""
        self.seen: dict[tuple[int, ...], list[int]] = {}
        """The guesses after each request's tokens."""
        self._random = random.Random(3)

    def take(self, plan: DraftPlan, sampled: Sequence[Sequence[int]], seconds: float) -> None:
        self._take(plan, sampled, seconds)
        for request in plan.requests[0]:
            made = self.speculation._guesses[request]
            assert isinstance(made, ModelGuesses)
            tokens, outputs = tuple(request.token_ids), request.token_ids[request.num_prompt_tokens :].tolist()
            if guesses := made.after(request.token_ids).tolist():
                self.seen[tokens] = guesses
                answers = self.answers.get(tokens[: request.num_prompt_tokens], [])
                answer = next((each for each in answers if each[: len(outputs)] == outputs), [])
                right = answer[len(outputs) :][: len(guesses)]
                mixed = [50 if self._random.random() < 0.2 else each for each in right] or guesses
                made.rate = 0.9  # they go on being worth it
                made.take(array("i", mixed), request.num_tokens)

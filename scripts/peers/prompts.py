"""Make the benchmark's prompts: random token ids from a fixed seed, so that every contestant gets the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SEED = 6
FIRST_PLAIN_ID = 256
"""Token ids below this one may be special."""


@dataclass(frozen=True)
class Requests:
    """Prompts, and the number of tokens to generate for each."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]

    @property
    def prompt_tokens(self) -> int:
        """Count the prompts' tokens."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Count the tokens to generate."""
        return sum(self.lengths)

    @property
    def decodes(self) -> list[int]:
        """Return, for each step after the prompts', the number of unfinished requests."""
        return [sum(length > step for length in self.lengths) for step in range(1, max(self.lengths))]

    @property
    def cached_tokens(self) -> int:
        """Return the sum of context lengths over these steps and their requests."""
        pairs = zip(self.prompts, self.lengths, strict=True)
        return sum(len(prompt) + step for prompt, length in pairs for step in range(length - 1))

    def first(self, num: int, max_length: int) -> Requests:
        """Return the first requests, none continued by more than `max_length` tokens."""
        return Requests(self.prompts[:num], [min(length, max_length) for length in self.lengths[:num]])


class Source:
    """Makes prompts that never repeat, so that no contestant finds one in its prefix cache."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(SEED)
        self._vocab_size = vocab_size

    def tokens(self, length: int) -> list[int]:
        """Return a number of random ids."""
        return [self._random.randrange(FIRST_PLAIN_ID, self._vocab_size) for _ in range(length)]

    def mixed(self, num: int, prompt: tuple[int, int], output: tuple[int, int]) -> Requests:
        """Return requests with lengths spread evenly over these ranges, both ends included."""
        prompts = [self.tokens(self._random.randint(*prompt)) for _ in range(num)]
        return Requests(prompts, [self._random.randint(*output) for _ in range(num)])

    def equal(self, num: int, prompt: int, output: int) -> Requests:
        """Return requests of equal length."""
        return self.mixed(num, (prompt, prompt), (output, output))

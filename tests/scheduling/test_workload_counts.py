"""Fixed workloads take a fixed number of steps, computed tokens and rows of padding. No clock is read.

The bounds are what was counted when they were set: a change may lower them, and one that raises them has to say why.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from jaxllm.execution.batch import num_token_rows
from jaxllm.execution.packing import make_buckets, pick_bucket
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.plan import StepPlan
from tests.scheduling.simulation import VOCAB_SIZE, Simulation, make_config, make_request

BUDGET, SEQS = 512, 256
BUCKETS = make_buckets(BUDGET, SEQS, least=4)
type Requests = list[tuple[list[int], int]]
"""Prompts, and how many tokens each is continued by."""


@dataclass
class Counts:
    """The cost of a workload."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0

    def add(self, plan: StepPlan) -> None:
        num_rows = num_token_rows(plan, 1)
        self.steps += 1
        self.tokens += plan.num_tokens
        self.rows += pick_bucket(BUCKETS, num_rows, plan.num_rows).num_tokens


class Counting(Simulation):
    """A simulation that counts its steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.counts = Counts()

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self.counts.add(plan)
        return plan


def run(*waves: Requests, enable_prefix_caching: bool = True) -> Counts:
    """Count what it takes to run each wave of requests to its end, one step in flight while the next is planned."""
    config = make_config(
        max_num_seqs=SEQS,
        max_num_batched_tokens=BUDGET,
        max_model_len=4096,
        block_size=128,
        num_blocks=1025,
        enable_prefix_caching=enable_prefix_caching,
    )
    simulation = Counting(config)
    for number, wave in enumerate(waves):
        for index, (prompt, length) in enumerate(wave):
            simulation.add(make_request(f"{number}-{index}", prompt, max_tokens=length))
        simulation.run(overlap=1)
    return simulation.counts


def tokens(source: random.Random, length: int) -> list[int]:
    return [source.randrange(1, VOCAB_SIZE) for _ in range(length)]


def test_mixed_lengths_offline() -> None:
    """The benchmark's offline workload: 64 requests of 16 to 256 and 16 to 128 tokens."""
    source = random.Random(6)
    requests = [(tokens(source, source.randint(16, 256)), source.randint(16, 128)) for _ in range(64)]
    counts = run(requests)
    needed = sum(len(prompt) + length - 1 for prompt, length in requests)
    assert counts.tokens == needed
    assert counts.steps <= 138
    # 1.06 with buckets between the doubled ones. A CPU's kernels, which those were for, now skip rows of padding.
    assert counts.rows <= 1.11 * needed


def test_one_stream() -> None:
    counts = run([(tokens(random.Random(1), 32), 128)])
    assert counts.steps <= 128
    assert counts.rows <= 32 + 127 * 4


def test_a_shared_beginning_is_computed_once() -> None:
    """A system prompt of 512 tokens and 64 questions of 32; the first asks before the others."""
    source = random.Random(2)
    system = tokens(source, 512)
    questions = [(system + tokens(source, 32), 8) for _ in range(64)]
    cached, uncached = (run(questions[:1], questions[1:], enable_prefix_caching=each) for each in (True, False))
    assert cached.tokens <= 512 + 64 * (32 + 7)
    assert uncached.tokens == 64 * (512 + 32 + 7)


def test_a_conversation_computes_each_turn_once() -> None:
    """Eight turns of 100 and 60 tokens, each repeating all before it: less than a block is computed again."""
    source, history, turns = random.Random(3), [], []
    for _ in range(8):
        history = history + tokens(source, 100)
        turns.append([(list(history), 60)])
        history = history + tokens(source, 60)
    counts = run(*turns)
    assert counts.tokens <= 8 * (100 + 60) + 7 * 128

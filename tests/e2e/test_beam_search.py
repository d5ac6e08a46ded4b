"""Beam search on real engines finds the beams of an oracle by vLLM's rules; beams share their blocks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.sampling_params import BeamSearchParams
from tests.e2e.inside import assert_nothing_left, generated
from tests.e2e.tiny_engine import CASE, RecordingScheduler, tiny_llm
from tests.models.tiny import folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

PROMPTS = [[5, 6, 7], list(range(20, 57)), list(range(100, 116)), [9]]
# One set of shapes, so that most engines find each other's programs in the cache.
USUAL: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "cudagraph_capture_sizes": [16],
    "max_model_len": 256,
    "max_logprobs": -1,
}
SMALL: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": 64,
    "max_logprobs": 16,
    "num_gpu_blocks_override": 6,
}
ENGINES = {"usual": USUAL, "no prefix cache": USUAL | {"enable_prefix_caching": False}, "small": SMALL}
END = 137  # the tiny model says it often


class Oracle:
    """Plain beam search over every continuation of every beam, from log-probabilities of the whole vocabulary."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._known: dict[tuple[int, ...], dict[int, float]] = {}

    def logprobs(self, sequences: list[list[int]]) -> list[dict[int, float]]:
        unknown = [ids for ids in sequences if tuple(ids) not in self._known]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True, detokenize=False)
        for ids, output in zip(unknown, self._llm.generate(unknown, params, use_tqdm=False), strict=True):
            [position] = output.outputs[0].logprobs or []
            assert len(position) == 256
            self._known[tuple(ids)] = {token_id: entry.logprob for token_id, entry in position.items()}
        return [self._known[tuple(ids)] for ids in sequences]

    def search(self, prompt: list[int], width: int, max_tokens: int, penalty: float) -> list[list[int]]:
        """Search by vLLM's rules: scores by the length of all tokens but the end, and every candidate end counts."""
        live: list[tuple[float, list[int]]] = [(0.0, [])]
        done: list[tuple[float, list[int]]] = []

        def score(beam: tuple[float, list[int]]) -> float:
            return beam[0] / (len(prompt) + len(beam[1]) - (beam[1][-1] == END)) ** penalty

        for _ in range(max_tokens):
            rows = self.logprobs([prompt + ids for _, ids in live])
            grown = [
                (total + row[token_id], [*ids, token_id])
                for (total, ids), row in zip(live, rows, strict=True)
                for token_id in sorted(row, key=row.__getitem__, reverse=True)[: 2 * width]
            ]
            done += [beam for beam in grown if beam[1][-1] == END]
            live = sorted((beam for beam in grown if beam[1][-1] != END), key=score, reverse=True)[:width]
        return [ids for _, ids in sorted(done + live, key=score, reverse=True)[:width]]


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with tiny_llm(CASE, **USUAL) as (llm, _):
        yield Oracle(llm)


def search_tiny(llm: LLM, width: int, penalty: float, max_tokens: int = 12) -> list[list[list[int]]]:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, length_penalty=penalty)
    return [generated(output) for output in llm.beam_search(PROMPTS, params)]


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the tiny model with a likely token as its end of sequence, and return the folder."""
    path = tmp_path_factory.mktemp("models") / CASE
    shutil.copytree(folder(CASE), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return str(path)


@pytest.mark.parametrize("name", ENGINES)
def test_equals_the_oracle(name: str, ending: str, oracle: Oracle) -> None:
    ends = 0
    with tiny_llm(ending, **ENGINES[name]) as (llm, scheduler):
        for width, penalty in ((1, 1.0), (2, 0.0), (3, -1.0), (4, 0.5)):
            lists = search_tiny(llm, width, penalty)
            assert lists == [oracle.search(prompt, width, 12, penalty) for prompt in PROMPTS], (width, penalty)
            ends += sum(beam[-1] == END for beams in lists for beam in beams)
            assert_nothing_left(scheduler)
        assert ends > 10
        num_sampled = sum(chunk.samples for plan in scheduler.plans for chunk in plan.chunks)
        num_tokens = scheduler.stats().num_scheduled_tokens - 4 * sum(len(ids) - 1 for ids in PROMPTS)
        # Where blocks run short, parents' are given up, and beams are computed from their first token on.
        assert num_tokens > 1.5 * num_sampled if name == "small" else num_tokens <= num_sampled


def test_blocks_are_shared_and_copied() -> None:
    """Each prompt is computed once, each beam's step is one token, and no beam holds a prompt of its own."""
    prompt, width, max_tokens = list(range(1, 101)), 4, 24  # six full blocks of 16 and a quarter of one
    most_blocks = 0

    with tiny_llm(CASE, **USUAL, enable_prefix_caching=False) as (llm, scheduler):

        def watch() -> None:
            nonlocal most_blocks
            most_blocks = max(most_blocks, scheduler.stats().num_blocks_in_use)
            scheduler.check()

        scheduler.before_plan = watch
        llm.beam_search(prompt, BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True))
        chunks = [chunk for plan in scheduler.plans for chunk in plan.chunks]
        assert sum(len(chunk.token_ids) for chunk in chunks) == len(prompt) + width * (max_tokens - 1)
        assert all(len(chunk.token_ids) == 1 for chunk in chunks if chunk.start >= len(prompt))
        copies = sum(len(plan.copies) for plan in scheduler.plans)
        # The first step gives a part-filled block to each beam; later ones only where two beams grow from one.
        assert width - 1 <= copies < width * (max_tokens - 1)
        # Old and new beams at once: the prompt's full blocks, and what lies beyond them for each.
        assert most_blocks <= 6 + 2 * width * 2
        assert_nothing_left(scheduler)


def test_others_run_on_and_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    with tiny_llm(CASE, **USUAL) as (llm, scheduler):
        alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
        searched = [generated(output) for output in llm.beam_search(PROMPTS, params)]
        llm.enqueue(PROMPTS, greedy)
        assert [generated(output) for output in llm.beam_search(PROMPTS, params)] == searched
        together = llm.wait_for_completion(use_tqdm=False)
        assert [output.outputs[0].token_ids for output in together] == alone

        def interrupt(scheduler: RecordingScheduler = scheduler, start: int = len(scheduler.plans)) -> None:
            if len(scheduler.plans) == start + 4:
                raise KeyboardInterrupt

        llm.enqueue(PROMPTS, greedy)
        scheduler.before_plan = interrupt
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search(PROMPTS, params)
        scheduler.before_plan = lambda: None
        llm.wait_for_completion(use_tqdm=False)
        assert_nothing_left(scheduler)
        assert [generated(output) for output in llm.beam_search(PROMPTS, params)] == searched

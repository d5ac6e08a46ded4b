"""Requests with top_k, top_p or min_p run in steps of their own program, and get the same tokens in any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.execution.step import StepShape
from jaxllm.sampling.inputs import Sampling
from tests.e2e.inside import core_of
from tests.e2e.tiny_engine import Job, run_together, tiny_llm

pytestmark = pytest.mark.engine

FIELDS: tuple[dict[str, Any], ...] = ({"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm("llama3_tied", max_num_batched_tokens=16, max_num_seqs=16, batch_invariant=True) as (llm, _):
        yield llm


def make_job(index: int, **fields: Any) -> Job:
    params = SamplingParams(temperature=1.5, seed=index, max_tokens=8, ignore_eos=True, detokenize=False, **fields)
    return Job([7 * index + 3, 5, 9 + index], params)


def tokens_of(llm: LLM, jobs: list[Job]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in run_together(llm, jobs)]


def samplings_of(llm: LLM, monkeypatch: pytest.MonkeyPatch, jobs: list[Job]) -> tuple[set[Sampling], list[list[int]]]:
    """Return the kinds of programs that jobs run, and their tokens."""
    runner = core_of(llm)._runner
    assert runner is not None
    kinds: set[Sampling] = set()
    get = runner.programs.get

    def note(key: Any) -> Any:
        if isinstance(key, StepShape):
            kinds.add(key.sampling)
        return get(key)

    with monkeypatch.context() as patch:
        patch.setattr(runner.programs, "get", note)
        tokens = tokens_of(llm, jobs)
    return kinds, tokens


def test_tokens_do_not_depend_on_the_program(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [make_job(index, **fields) for index, fields in enumerate(FIELDS)]
    plain = [make_job(index) for index in range(len(FIELDS))]
    full = make_job(11, top_p=0.7, logprobs=1)
    kinds, alone = samplings_of(llm, monkeypatch, jobs)
    assert kinds == {Sampling.TRUNCATED}
    kinds, untruncated = samplings_of(llm, monkeypatch, plain)
    assert kinds == {Sampling.PLAIN}
    assert all(left != right for left, right in zip(alone, untruncated, strict=True)), "nothing was cut off"
    kinds, mixed = samplings_of(llm, monkeypatch, [*jobs, *plain])
    assert Sampling.TRUNCATED in kinds
    assert Sampling.FULL not in kinds
    assert mixed == alone + untruncated
    kinds, beside_full = samplings_of(llm, monkeypatch, [*jobs, *plain, full])
    assert Sampling.FULL in kinds
    assert beside_full[:-1] == alone + untruncated

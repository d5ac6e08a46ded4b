"""With drafts, models with recurrent state give what they give without, to the bit: no wrong draft spoils a state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxllm import RequestOutput, SamplingParams
from tests.e2e.inside import limited
from tests.e2e.test_batch_invariance import CONTEXT, differing
from tests.e2e.test_speculation import ALL, MOST, SETTINGS, Engine, Oracle, accepted, numbers_of_drafts
from tests.e2e.tiny_engine import Job, run_together, tiny_llm
from tests.e2e.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile", "estimated_costs")]

CASES = ("qwen3_next", "nemotron_h", "lfm2")
"""The delta rule beside attention, Mamba-2 beside attention and experts, and short convolutions."""
SOME = ALL[::3]
OTHERS: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 128, "cudagraph_capture_sizes": [8, 32]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(case: str, tokenizer: str) -> list[RequestOutput]:
    """Run the jobs without drafts."""
    with tiny_llm(case, tokenizer=tokenizer, **SETTINGS | OTHERS) as (llm, _):
        assert llm.model_config.batch_invariant
        return run_together(llm, SOME)


@pytest.fixture(scope="module")
def engine(case: str, tokenizer: str, reference: list[RequestOutput]) -> Iterator[Engine]:
    """Start an engine whose drafts are mostly right, and always worth it."""
    config = {"method": "ngram", "num_speculative_tokens": MOST}
    with tiny_llm(case, tokenizer=tokenizer, speculative_config=config, **SETTINGS | OTHERS) as (llm, scheduler):
        assert scheduler._speculation is not None
        scheduler._speculation._drafter = Oracle(reference)
        scheduler._speculation._settings = replace(scheduler._speculation._settings, num_free_rows=1e6)
        yield llm, scheduler


@pytest.mark.parametrize("company", [3, 20])
def test_drafts_change_nothing(company: int, engine: Engine, reference: list[RequestOutput]) -> None:
    """Requests preempt each other, and find prefixes and their states in the cache."""
    llm, scheduler = engine
    before, order, outputs = accepted(scheduler), list(range(len(SOME))), dict[int, RequestOutput]()
    random.Random(company).shuffle(order)
    for start in range(0, len(order), company):
        some = order[start : start + company]
        budget, num_blocks = (64, CONTEXT // 16) if start % (2 * company) else (128, 1600)
        with limited(scheduler, budget, num_blocks=num_blocks):
            outputs |= dict(zip(some, run_together(llm, [SOME[index] for index in some]), strict=True))
        scheduler.check()
    assert differing(reference, [outputs[index] for index in range(len(SOME))]) == []
    drafted, right = (now - then for now, then in zip(accepted(scheduler), before, strict=True))
    assert right > 60
    assert drafted - right > 15
    assert numbers_of_drafts(scheduler) >= {0, 1, 2, MOST}


def test_answers_with_drafts_leave_snapshots(engine: Engine, reference: list[RequestOutput]) -> None:
    """A conversation goes on from a state within its answer, even where that was the state after a draft."""
    llm, _ = engine
    longest = max(reference, key=lambda output: len(output.outputs[0].token_ids))
    prompt, answer = list(longest.prompt_token_ids or ()), list(longest.outputs[0].token_ids)
    assert llm.reset_prefix_cache()
    job = SOME[reference.index(longest)]
    run_together(llm, [job])
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    longer = Job([*prompt, *answer, 9, 8, 7], params)
    [again] = run_together(llm, [longer])
    assert len(prompt) < (again.num_cached_tokens or 0)
    assert llm.reset_prefix_cache()
    [anew] = run_together(llm, [longer])
    assert again.outputs[0].token_ids == anew.outputs[0].token_ids

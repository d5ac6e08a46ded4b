"""Every field of `SamplingParams`, in a batch of 16 with all features on, against a float64 oracle of the sampler.

Two engines run the same requests and give the same tokens: one shows the raw logits, from which the oracle computes
what the other, which shows the processed ones, must have made of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.exceptions import VLLMValidationError
from tests.e2e.sampling_cases import CASES, GREEDY, PROMPT, Case, others, tilt
from tests.e2e.sampling_checks import GOLDEN, GOLDEN_TOLERANCE, Evidence, log_softmax, logits_of
from tests.e2e.sampling_oracle import check_step
from tests.e2e.tiny_engine import CASE, Job, RecordingScheduler, run_together, tiny_llm
from tests.e2e.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.engine

Engine = tuple[LLM, RecordingScheduler]
FIELDS = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
RUN_FIELDS = [name for name, case in CASES.items() if not case.is_refused]
PLAIN = Job(PROMPT, SamplingParams(**GREEDY))
OTHERS = others()
IS_INVARIANT = jax.__version_info__ >= (0, 12)
"""True where float32 is invariant; with an older jax, tokens and texts are all that can be compared."""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what both engines are made with: rows are to be compared to the bit."""
    return {
        "tokenizer": save_tokenizer(tmp_path_factory.mktemp("tokenizer")),
        "skip_tokenizer_init": False,
        "block_size": 8,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
        "cudagraph_capture_sizes": [16],
        "max_logprobs": -1,
        "batch_invariant": True if IS_INVARIANT else None,
        "logits_processors": [tilt],
    }


@pytest.fixture(scope="module")
def raw(arguments: dict[str, Any]) -> Iterator[Engine]:
    """Start the engine that shows the model's logits."""
    with tiny_llm(CASE, logprobs_mode="raw_logits", **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def processed(arguments: dict[str, Any]) -> Iterator[Engine]:
    """Start the engine that shows what tokens are sampled from."""
    with tiny_llm(CASE, logprobs_mode="processed_logits", **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(raw: Engine, processed: Engine) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return both engines' outputs of a batch whose row 0 is plain and greedy."""
    both = [run_together(llm, [PLAIN, *OTHERS]) for llm, _ in (raw, processed)]
    # A grammar's rows sit out the step that follows each of their own.
    steps = [{chunk.request_id for chunk in plan.chunks} for plan in raw[1].plans]
    assert max(len(step | after) for step, after in itertools.pairwise(steps)) == 16
    return both[0], both[1]


@pytest.fixture(scope="module")
def identities(raw: Engine, processed: Engine) -> dict[str, tuple[RequestOutput, RequestOutput]]:
    """Return both engines' outputs of each case's request without its feature."""
    jobs = [CASES[name].identity(name) for name in RUN_FIELDS]
    left, right = (run_together(llm, jobs) for llm, _ in (raw, processed))
    return dict(zip(RUN_FIELDS, zip(left, right, strict=True), strict=True))


def stream(llm: LLM, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run jobs together and return all outputs of the first, as they come."""
    for index, job in enumerate(jobs):
        llm.llm_engine.add_request(f"streamed {index}", TokensPrompt(prompt_token_ids=job.prompt), job.params)
    outputs: list[RequestOutput] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in llm.llm_engine.step() if output.request_id == "streamed 0"]
    return outputs


def verify(case: Case, evidence: Evidence) -> None:
    """Check a request's outputs: each step by the oracle, and what the case says of them."""
    outputs = list(zip(evidence.raw.outputs, evidence.processed.outputs, strict=True))
    for index, (left, right) in enumerate(outputs if case.shows_all_logits else ()):
        assert list(left.token_ids) == list(right.token_ids)
        assert left.logprobs is not None
        assert right.logprobs is not None
        request = case.oracle_request(index)
        for step, token in enumerate(left.token_ids):
            raw_v, processed_v = logits_of(left.logprobs[step]), logits_of(right.logprobs[step])
            check_step(raw_v, processed_v, token, request, left.token_ids[:step])
    case.check(evidence)


def comparable(output: RequestOutput) -> tuple[Any, ...]:
    """Return the computed values of an output, without the number of cached tokens."""
    if not IS_INVARIANT:
        return tuple((each.token_ids, each.text, each.finish_reason) for each in output.outputs)
    matrix = output.prompt_token_id_logprobs
    asked = None if matrix is None else np.asarray(matrix).tobytes()
    return output.prompt_token_ids, output.prompt_logprobs, output.outputs, asked


def test_each_field_has_a_case() -> None:
    """A new field needs a case; so does a derived one, since users can pass it."""
    assert sorted(CASES) == sorted(FIELDS)
    assert all(name in case.fields for name, case in CASES.items())


def test_the_batch_uses_all_kinds_of_features() -> None:
    used = {name for job in OTHERS for name in FIELDS if getattr(job.params, name) != getattr(SamplingParams(), name)}
    assert len(OTHERS) == 15
    assert len(used) >= 25


def test_the_plain_row_is_the_models(plain: tuple[list[RequestOutput], list[RequestOutput]]) -> None:
    """What the oracle starts from equals HF's: tokens and log-probabilities."""
    for outputs in plain:
        output = outputs[0].outputs[0]
        assert list(output.token_ids) == GOLDEN.tokens[: len(output.token_ids)].tolist()
        shown_sv = np.stack([log_softmax(logits_of(position)) for position in output.logprobs or ()])
        np.testing.assert_allclose(shown_sv, GOLDEN.logprobs[: len(shown_sv)], atol=GOLDEN_TOLERANCE)


@pytest.mark.skipif(not IS_INVARIANT, reason="values are not compared before jax 0.12")
def test_would_notice_a_changed_row(plain: tuple[list[RequestOutput], list[RequestOutput]]) -> None:
    """The rows that must stay unchanged are all different, and the least change of a value is one."""
    rows = [comparable(output) for output in plain[0]]
    assert all(left != right for left, right in itertools.combinations(rows, 2))
    changed = deepcopy(plain[0][1])
    positions = changed.outputs[0].logprobs
    assert positions is not None
    entry = next(iter(positions[-1].values()))
    entry.logprob = float(np.nextafter(np.float32(entry.logprob), np.float32(np.inf)))
    assert comparable(changed) != rows[1]


@pytest.mark.parametrize("name", RUN_FIELDS)
def test_field(
    name: str,
    raw: Engine,
    processed: Engine,
    plain: tuple[list[RequestOutput], list[RequestOutput]],
    identities: dict[str, tuple[RequestOutput, RequestOutput]],
) -> None:
    """The field does what the oracle says, changes no other row, and its check fails on the request without it."""
    case, job = CASES[name], CASES[name].job()
    both = [run_together(llm, [job, *OTHERS]) for llm, _ in (raw, processed)]
    streamed = stream(raw[0], [job, *OTHERS]) if case.streams else []
    verify(case, Evidence(job.params, both[0][0], both[1][0], streamed, plain[0][0]))
    for outputs, before in zip(both, plain, strict=True):
        changed = [
            row
            for row, pair in enumerate(zip(outputs, before, strict=True))
            if comparable(pair[0]) != comparable(pair[1])
        ]
        assert changed in ([], [0])
    without = case.identity(name)
    streamed = stream(raw[0], [without]) if case.streams else []
    with pytest.raises(AssertionError):
        verify(case, Evidence(without.params, *identities[name], streamed, plain[0][0]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_refused])
def test_refused_field(name: str) -> None:
    with pytest.raises(VLLMValidationError, match=name) as caught:
        SamplingParams(**CASES[name].fields)
    assert caught.value.parameter == name

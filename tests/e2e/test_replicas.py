"""Two replicas of a tiny model, in processes of their own, answer as one engine does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.client.replicated_core import ReplicatedCore
from jaxllm.engine.front.metrics import Counter
from jaxllm.exceptions import VLLMValidationError
from tests.e2e.media_goldens import folder as media_folder
from tests.e2e.media_goldens import prompt_of, read_golden
from tests.e2e.tiny_engine import CASE
from tests.models.tiny import folder

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "cudagraph_capture_sizes": [8, 32],
    "enforce_eager": True,
    "disable_log_stats": True,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(str(folder(CASE)), data_parallel_size=2, **SETTINGS)
    yield made
    made.llm_engine.shutdown()


def replicas(llm: LLM) -> ReplicatedCore:
    core = llm.llm_engine._core
    assert isinstance(core, ReplicatedCore)
    return core


def jobs() -> tuple[list[Any], list[SamplingParams]]:
    rng = random.Random(0)
    shared = [rng.randrange(9, 200) for _ in range(40)]
    prompts: list[Any] = []
    for number in range(20):
        tail = [rng.randrange(9, 200) for _ in range(5 + number)]
        prompts.append({"prompt_token_ids": [*shared, *tail] if number % 3 == 0 else tail})
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.8, "n": 2},
        {"temperature": 1.1, "presence_penalty": 0.5, "min_p": 0.05, "prompt_logprobs": 1},
    ]
    kind = [SamplingParams(max_tokens=24, seed=number, ignore_eos=True, **kinds[number % 3]) for number in range(20)]
    return prompts, kind


def exact(outputs: list[Any]) -> list[Any]:
    return [
        (each.prompt_logprobs, [(one.token_ids, one.logprobs, one.cumulative_logprob) for one in each.outputs])
        for each in outputs
    ]


def test_the_order_and_the_tokens_are_those_of_one_engine_to_the_bit(llm: LLM) -> None:
    prompts, params = jobs()
    alone = LLM(str(folder(CASE)), **SETTINGS)
    expected = alone.generate(prompts, params, use_tqdm=False)
    alone.llm_engine.shutdown()
    for _ in range(2):  # the second time with prefixes in the caches
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert exact(outputs) == exact(expected)
    generated = [each for each in llm.get_metrics() if each.name == "vllm:generation_tokens"]
    counts = {each.labels["engine"]: each.value for each in generated if isinstance(each, Counter)}
    assert counts.keys() == {"0", "1"}
    assert min(counts.values()) > 0.3 * sum(counts.values())
    assert llm.reset_prefix_cache()
    with pytest.raises(VLLMValidationError, match="logits_processors"):
        LLM(str(folder(CASE)), data_parallel_size=2, logits_processors=[lambda logits: logits], **SETTINGS)


def test_prompts_with_pictures_go_to_where_their_blocks_are() -> None:
    family = "qwen2_vl"
    goldens = [read_golden(family, name) for name in ("one", "two", "turn")]
    params = SamplingParams(temperature=0.0, max_tokens=len(goldens[0].tokens), ignore_eos=True)
    settings = SETTINGS | {"skip_tokenizer_init": False, "max_model_len": 320, "max_num_batched_tokens": 320}
    with LLM(str(media_folder(family)), data_parallel_size=2, **settings) as llm:
        for is_cached in (False, True):
            for golden in goldens:  # one after the other: without blocks of theirs, replicas take turns
                [output] = llm.generate(prompt_of(family, golden), params, use_tqdm=False)
                assert list(output.outputs[0].token_ids) == golden.tokens.tolist()
                assert bool(output.num_cached_tokens) == is_cached
        outputs = llm.generate([prompt_of(family, golden) for golden in goldens * 3], params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [
            each.tokens.tolist() for each in goldens * 3
        ]


def test_a_beam_search_stays_with_one_replica(llm: LLM) -> None:
    from jaxllm.sampling_params import BeamSearchParams

    prompts: list[Any] = [{"prompt_token_ids": [7, 8, 9, 10 + number]} for number in range(3)]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    outputs = llm.beam_search(prompts, params)
    with LLM(str(folder(CASE)), **SETTINGS) as alone:
        expected = alone.beam_search(prompts, params)
    assert [[beam.tokens for beam in each.sequences] for each in outputs] == [
        [beam.tokens for beam in each.sequences] for each in expected
    ]
    router = replicas(llm).replicas.router
    assert not router._kept
    assert not router._sequences


def test_a_killed_replica_costs_its_own_requests_alone(llm: LLM) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [number + 9] * 4} for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    expected = llm.generate(prompts, params, use_tqdm=False)
    core = replicas(llm)

    def kill() -> None:
        while not core.replicas.router.sequences(1):
            time.sleep(0.001)
        time.sleep(0.05)
        os.kill(core.process_ids[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    killer.join()
    failed = [each.outputs[0].finish_reason == "error" for each in outputs]
    assert sum(failed) == 4
    assert all(
        is_failed or got.outputs[0].token_ids == want.outputs[0].token_ids
        for is_failed, got, want in zip(failed, outputs, expected, strict=True)
    )
    again = llm.generate(prompts, params, use_tqdm=False)
    assert exact(again) == exact(expected)

"""Heads that read the model's features guess as HF's parts do, whoever shares the batch, and change no token."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.model_runner import ModelRunner
from pallas_kernels.weights.held import Quantized
from tests.e2e.guessing import Guesses, head_config
from tests.e2e.inside import core_of, limited
from tests.e2e.tiny_engine import Job, RecordingScheduler, bits, run_together, tiny_llm
from tests.models.heads import CASES, HEADS, model_folder, read_goldens
from tests.models.tiny import folder

pytestmark = [pytest.mark.usefixtures("quick_compile", "estimated_costs"), pytest.mark.families]

FULL = ("eagle3", "mtp_deepseek_v3", "mtp_qwen3_5")
"""The cases in which whole workloads are run."""
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "cudagraph_capture_sizes": [8, 32],
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 400,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 1.0, "logit_bias": {20: 4.0}, "min_tokens": 6, "stop_token_ids": [20, 21]},
)


def start(case: str, **arguments: Any) -> Any:
    """Start an engine of the model whose tokens a case guesses."""
    return tiny_llm(str(model_folder(case)), **(SETTINGS | arguments))


def make_jobs() -> list[Job]:
    """Return jobs of all kinds; no two prompts begin alike."""
    rng, jobs = random.Random(7), []
    for index in range(8 * len(KINDS)):
        prompt = [10 + index, *(rng.randrange(7, 256) for _ in range(rng.choice((2, 9, 17, 33, 70, 150))))]
        fields = KINDS[index % len(KINDS)]
        jobs.append(Job(prompt, SamplingParams(**fields, seed=index, logprobs=2, max_tokens=8 + index % 30)))
    return jobs


JOBS = make_jobs()


type Engine = tuple[LLM, RecordingScheduler, Guesses]


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    with start(request.param, speculative_config=head_config(request.param)) as (llm, scheduler):
        yield request.param, (llm, scheduler, Guesses(scheduler))


def test_guesses_equal_hf(engine: tuple[str, Engine]) -> None:
    case, (llm, _, guesses) = engine
    for golden in read_goldens(case):
        tokens = golden.sequence.tolist()
        # The first guesses are of what follows its second token.
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = run_together(llm, [Job(tokens[:-2], params)])
        assert list(output.outputs[0].token_ids[:2]) == tokens[-2:]
        assert guesses.seen[tuple(tokens)] == golden.guesses.tolist()


def test_the_model_lends_its_tables(engine: tuple[str, Engine]) -> None:
    """Embedding and output head are not loaded twice, unless the draft head has its own."""
    case, (llm, _, _) = engine
    runner = core_of(llm)._runner
    assert isinstance(runner, ModelRunner)
    assert runner._draft is not None
    params, head = runner.launcher.params, runner._draft.launcher.params
    tables = {name: params.get(name, params["embed"])["table"] for name in head.keys() & {"embed", "lm_head"}}
    lent = {name for name, table in tables.items() if head[name]["table"] is table}
    tied = {"embed"}
    expected = {"eagle3": {"embed"}, "eagle3_speculators": set[str](), "mtp_qwen3_5": tied}
    assert lent == expected.get(case, {"embed", "lm_head"})
    assert set(head) >= {"embed", "fuse", "layers"}
    assert "lm_head" in head or lent == tied


def test_guesses_change_nothing_and_do_not_depend_on_company(engine: tuple[str, Engine]) -> None:
    """A head's state is the same after right drafts and wrong ones, preemptions, and prompts in chunks."""
    case, (llm, scheduler, guesses) = engine
    if case not in FULL:
        pytest.skip("whole workloads are run with three heads")
    guesses.answers = {}
    alone = [output for job in JOBS for output in run_together(llm, [job])]
    expected, guesses.seen = guesses.seen, {}
    guesses.answers = {
        tuple(job.prompt): [list(each.outputs[0].token_ids)] for job, each in zip(JOBS, alone, strict=True)
    }
    before, outputs = counts(guesses), dict[int, RequestOutput]()
    order = list(range(len(JOBS)))
    random.Random(1).shuffle(order)
    for turn, first in enumerate(range(0, len(order), 8)):
        assert llm.reset_prefix_cache()
        some = order[first : first + 8]
        with limited(scheduler, 40 if turn % 2 else 128, num_blocks=16 if turn % 2 else 400):
            outputs |= dict(zip(some, run_together(llm, [JOBS[index] for index in some]), strict=True))
    drafted, right = (now - then for now, then in zip(counts(guesses), before, strict=True))
    assert right > 150
    assert drafted - right > 50
    compared = 0
    for tokens, seen in guesses.seen.items():
        if tokens in expected:
            count = min(len(seen), len(expected[tokens]))
            compared += count
            assert seen[:count] == expected[tokens][:count]
    assert compared > 200
    with start(case) as (plain, _):
        reference = [output for job in JOBS for output in run_together(plain, [job])]
    assert [bits(each) for each in reference] == [bits(each) for each in alone]
    assert [bits(each) for each in reference] == [bits(outputs[index]) for index in range(len(JOBS))]


def counts(guesses: Guesses) -> tuple[int, int]:
    """Return the numbers of drafts and of accepted drafts."""
    stats = guesses.speculation.stats()
    return stats.num_draft_tokens, stats.num_accepted_tokens


def test_features_are_copied_with_blocks(engine: tuple[str, Engine]) -> None:
    """Several outputs of a prompt share its blocks, except that each has a copy of the last one.

    They are as good as greedy, and so are guesses, which know of the temperature alone.
    """
    _, (llm, _, guesses) = engine
    guesses.answers = {}
    seen = []
    for count in (1, 3):
        assert llm.reset_prefix_cache()
        guesses.seen = {}
        params = SamplingParams(n=count, temperature=0.01, top_k=1, max_tokens=8, ignore_eos=True, seed=7)
        run_together(llm, [Job([9, *range(70, 90)], params)])
        seen.append(guesses.seen)
    common = seen[0].keys() & seen[1].keys()
    assert len(common) > 2
    for tokens in common:
        assert all(one == other for one, other in zip(seen[0][tokens], seen[1][tokens], strict=False))


def test_a_quantized_model_of_several_groups_lends_its_table() -> None:
    """The head's embedding is in int8 then, and its features lie in blocks of the group that keeps them all."""
    jobs = JOBS[: 2 * len(KINDS)]
    settings: dict[str, Any] = {"quantization": "int8", "dtype": "bfloat16"}
    with tiny_llm("gemma2", **(SETTINGS | settings)) as (plain, _):
        expected = run_together(plain, jobs)
    with tiny_llm("gemma2", **(SETTINGS | settings), speculative_config=head_config("eagle3")) as (llm, scheduler):
        guesses = Guesses(scheduler)
        guesses.answers = {
            tuple(job.prompt): [list(each.outputs[0].token_ids)] for job, each in zip(jobs, expected, strict=True)
        }
        runner = core_of(llm)._runner
        assert isinstance(runner, ModelRunner)
        assert runner._draft is not None
        assert isinstance(runner._draft.launcher.params["embed"]["table"], Quantized)
        group = runner.compiler.config.features
        assert group is not None
        assert group.group == 1
        assert [bits(each) for each in expected] == [bits(each) for each in run_together(llm, jobs)]
        assert counts(guesses)[1] > 30


def test_a_reset_engine_guesses_again(engine: tuple[str, Engine]) -> None:
    """After a step has failed, the pools of model and head are made anew."""
    case, (llm, _, guesses) = engine
    runner = core_of(llm)._runner
    assert runner is not None
    runner.reset()
    assert llm.reset_prefix_cache()
    golden = read_goldens(case)[0]
    tokens = golden.sequence.tolist()
    guesses.answers, guesses.seen = {}, {}
    run_together(llm, [Job(tokens[:-2], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))])
    assert guesses.seen[tuple(tokens)] == golden.guesses.tolist()


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (folder("llama2"), {"method": "mtp"}, "DeepseekV3ForCausalLM, .*LlamaForCausalLM"),
        (folder("deepseek_v3"), {"method": "mtp"}, "missing: model.layers.2"),
        (HEADS / "mtp_glm4_moe", {"method": "mtp", "quantization": "int8"}, "quantization"),
        (HEADS / "mtp_glm4_moe", {"method": "mtp", "model": "another"}, "another"),
        (folder("llama2"), {"method": "eagle3"}, "needs model"),
        (folder("llama2"), {"method": "eagle3", "model": str(folder("phi3"))}, "num_hidden_layers is 2"),
        (folder("gemma3"), {"method": "eagle3", "model": "/not/there"}, "/not/there"),
        (folder("qwen2_moe"), {"method": "eagle3", "model": str(HEADS / "eagle3")}, "reads 144 numbers .* has 96"),
        (folder("nemotron_h"), {"method": "mtp"}, "is for DeepseekV3ForCausalLM, .* NemotronHForCausalLM"),
        (folder("qwen3_5"), {"method": "mtp"}, "missing: mtp.fc.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused(model: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        LLM(str(model), skip_tokenizer_init=True, speculative_config=config)
    assert caught.value.parameter == "speculative_config"


def test_a_head_is_no_model(tmp_path: Path) -> None:
    shutil.copytree(HEADS / "eagle3", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VLLMValidationError, match="is a draft head") as caught:
        LLM(str(tmp_path), skip_tokenizer_init=True)
    assert caught.value.parameter == "model"
    (tmp_path / "config.json").write_text(json.dumps(config | {"eagle_config": None}))
    with pytest.raises(VLLMValidationError, match="method='eagle3'"):
        LLM(str(tmp_path), skip_tokenizer_init=True)
    with pytest.raises(VLLMValidationError, match="method='eagle3'") as caught:
        LLM(str(folder("llama2")), skip_tokenizer_init=True, speculative_config={"model": str(tmp_path)})
    assert caught.value.parameter == "speculative_config"

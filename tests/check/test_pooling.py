"""`jaxllm check` of models that pool, with the CPU for hardware: the engine's programs, its blocks, and its bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from jaxllm import LLM
from jaxllm.check.bounds import Work, count_work
from jaxllm.check.examine import examine
from jaxllm.check.report import Report
from jaxllm.check.table import render
from jaxllm.engine.core import startup
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.models import Model, ModelSpecs, get_family
from jaxllm.resolve.engine_args import EngineArgs
from tests.check.support import TOY, add_toy, engine_args
from tests.e2e.inside import core_of
from tests.models.tiny import POOLING, folder

pytestmark = pytest.mark.programs


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy(monkeypatch)


def pooling_args(case: str, **changes: Any) -> EngineArgs:
    return engine_args(**({"model": str(POOLING / case), "max_model_len": 64, "max_num_batched_tokens": 64} | changes))


@pytest.fixture(scope="module")
def report() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        add_toy(patch)
        return examine(pooling_args("bert"), "toy:1x1")


def test_programs_are_those_of_a_model_that_pools(report: Report):
    assert report.fits
    programs = [(program.name, program.num_tokens, program.num_seqs) for program in report.programs]
    assert programs == [("pool", 64, 8), ("pool by token", 64, 8)]
    classifier = examine(pooling_args("bert_tokens"), "toy:1x1")
    assert [program.name for program in classifier.programs] == ["pool by token"]


def test_the_engine_gets_as_many_blocks_as_the_report_names(report: Report, monkeypatch: pytest.MonkeyPatch):
    """They are those of two steps of 64 tokens, a part-filled one for each of 8 texts, and the null block."""
    assert report.memory.num_blocks == 1 + 2 * 64 // 16 + 8
    monkeypatch.setattr(startup, "memory_limit", lambda config: TOY.memory_limit(config.args.gpu_memory_utilization))
    with LLM(**dataclasses.asdict(pooling_args("bert", enforce_eager=True))) as llm:
        runner = core_of(llm)._runner
        assert isinstance(runner, ModelRunner)
        assert sum(array.nbytes for array in jax.tree.leaves(runner.launcher.pools)) == report.memory.kv_cache
        assert sum(array.nbytes for array in jax.tree.leaves(runner.launcher.params)) == report.memory.params


def test_the_report_says_what_a_step_takes(report: Report):
    assert [(each.length, each.requests) for each in report.concurrency] == [(32, 2), (64, 1)]
    assert [(bound.phase, bound.batch, bound.length) for bound in report.bounds] == [
        *(("pool", batch, 32) for batch in (1, 2)),
        ("pool", 1, 64),
    ]
    text = render(report)
    assert f"{report.memory.num_blocks} KV blocks of 16 tokens, which last for a step, " in text
    assert "runner=pooling, tasks=embed/token_embed, " in text
    assert "Texts of a step, by length" in text
    assert "decode" not in text


def test_a_decoder_that_pools_takes_long_texts_in_steps():
    report = examine(pooling_args("qwen3_embedder", max_model_len=256), "toy:1x1")
    assert report.fits
    assert report.memory.groups[0].causal
    assert [(each.length, each.requests) for each in report.concurrency] == [(32, 2), (128, 1), (256, 1)]
    assert "which last for a step" not in render(report)


def test_an_engine_that_generates_and_embeds_has_the_programs_of_both():
    args = engine_args(model=str(folder("llama3_tied")), runner="generate", convert="embed")
    report = examine(args, "toy:1x1")
    assert [program.name for program in report.programs] == [
        *("decode", "prefill", "prefill, every sampling feature", "pool", "pool by token")
    ]
    assert {bound.phase for bound in report.bounds} == {"decode", "prefill"}
    assert "Requests at once" in render(report)


def test_bounds_are_of_the_layers_and_the_head_that_pools():
    hf = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    config = get_family(hf["architectures"][0]).read_config(hf)
    work = _count(Model(ModelSpecs(config, "bfloat16")), generates=False)
    layer = 4 * 768**2 + 2 * 768 * 3072
    assert work.token_flops == 2 * 12 * layer
    assert work.head_flops == 2 * (768**2 + 3 * 768)
    assert work.param_bytes / 2 == pytest.approx(12 * layer + 768**2 + 3 * 768, rel=2e-3)  # norms and biases aside
    # Each token of a text sees all of it.
    flops = 8 * (100 * work.token_flops + work.head_flops + 12 * 4 * 12 * 64 * 100**2)
    bound = work.pool(8, 100)
    assert (bound.tokens_per_second, bound.limited_by) == (pytest.approx(800 / (flops / 1e3)), "matmul")


def test_a_model_that_generates_too_keeps_its_output_head():
    hf = {"architectures": ["Qwen3Model"], "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64}
    hf |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    hf |= {"head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    hf |= {"hidden_act": "silu", "tie_word_embeddings": True}
    model = Model(ModelSpecs(get_family("Qwen3Model").read_config(hf), "bfloat16"))
    pooled, both = _count(model, generates=False), _count(model, generates=True)
    assert (pooled.head_flops, both.head_flops) == (0, 2 * 1000 * 64)
    assert both.token_flops == pooled.token_flops
    assert both.param_bytes - pooled.param_bytes == 2 * 1000 * 64


def _count(model: Model, *, generates: bool) -> Work:
    return count_work(
        model.config,
        model.specs.param_specs(),
        make_mesh(jax.devices()[:1]),
        kv_itemsize=2,
        max_num_batched_tokens=2048,
        bytes_per_second=1e9,
        flops_per_second=1e3,
        generates=generates,
    )

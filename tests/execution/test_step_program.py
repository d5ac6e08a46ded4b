"""The compiled step has a bounded size and memory; there are few, and none is compiled late."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.execution.packing import Bucket
from jaxllm.execution.programs import shapes as shapes_module
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import Upkeep
from jaxllm.execution.step import StepShape
from jaxllm.models import LayerLoop
from jaxllm.sampling.inputs import Sampling
from pallas_kernels.paged_attention import AttentionShape, PagedAttention
from tests.e2e.inside import core_of
from tests.execution.support import hostile_jax, make_compiler, make_group
from tests.models.tiny import folder

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("quick_compile")]

OF_MEDIA = (Upkeep.MAKE_MEDIA, Upkeep.WRITE_MEDIA)
COMPILED = "/jax/core/compile/backend_compile_duration"


def pool_bytes(num_blocks: int, dtype: Any) -> int:
    return num_blocks * make_group(dtype=dtype).block_bytes


@pytest.mark.parametrize("loop", [LayerLoop.SCAN, LayerLoop.IN_PLACE])
@pytest.mark.parametrize("sampling", Sampling)
def test_program_size_does_not_grow_with_depth(sampling: Sampling, loop: LayerLoop) -> None:
    sizes = []
    for num_layers in (2, 12):
        compiler = make_compiler(num_layers, loop=loop)
        shape = next(shape for shape in compiler.shapes.steps() if shape.sampling is sampling)
        sizes.append(len(compiler.lower(shape, 33).as_text().splitlines()))
    assert sizes[0] == sizes[1]


def test_a_program_for_a_single_row_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU in plain XLA has one; here a CPU stands in for it."""
    tokens = []
    for has_one in (False, True):
        monkeypatch.setattr(shapes_module, "single_row_pays", lambda *_, pays=has_one: pays)
        llm = LLM(str(folder("qwen3_moe")), skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4)
        runner = core_of(llm)._runner
        assert runner is not None
        assert (Bucket(1, 1) in runner.compiler.shapes.buckets) is has_one
        [output] = llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7]), SamplingParams(temperature=0, max_tokens=8))
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_the_users_jax_settings_change_no_program() -> None:
    compiler = make_compiler(max_num_seqs=4, max_num_batched_tokens=8)
    keys = [
        compiler.shapes.steps()[-1],
        *(each for each in Upkeep if not each.is_of_adapters and each not in OF_MEDIA),
    ]
    expected = [compiler.lower(key, 33).as_text() for key in keys]
    with hostile_jax():
        assert [compiler.lower(key, 33).as_text() for key in keys] == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_pool_is_aliased_and_scratch_does_not_depend_on_it(dtype: jnp.dtype) -> None:
    compiler = make_compiler(dtype=dtype)
    # The largest bucket and the smallest stand for all; each costs two compiles.
    shapes = compiler.shapes.steps()
    plain, truncated, full = ([shape for shape in shapes if shape.sampling is sampling] for sampling in Sampling)
    for shape in (plain[0], plain[1], full[0]) if dtype == jnp.float32 else (plain[1], truncated[0], full[0]):
        temps = []
        for num_blocks in (33, 1025):
            memory = compiler.compile(shape, num_blocks).memory_analysis()
            assert memory is not None
            assert memory.alias_size_in_bytes >= pool_bytes(num_blocks, dtype)
            temps.append(memory.temp_size_in_bytes)
        assert abs(temps[1] - temps[0]) <= 0.01 * temps[0], (shape.batch.bucket, temps)


def weight_copies(compiler: StepCompiler) -> list[str]:
    """Return the compiled step's instructions that write an array of the shape of a layer's down matrix."""
    cfg = compiler.model.config
    shape = f"{cfg.hidden_size},{cfg.layers[0].intermediate_size}"
    pattern = rf" = f32\[(?:1,)?{shape}\]\S* (?!parameter|get-tuple-element|bitcast)\S+\("
    text = compiler.compile(compiler.shapes.steps()[0], 33).as_text() or ""
    return [line.strip() for line in text.splitlines() if re.search(pattern, line)]


def test_a_step_on_a_cpu_copies_no_weights() -> None:
    """Copies took a quarter of a decode step when layers were scanned, and more where einsums were not in 2-D."""
    assert not weight_copies(make_compiler(loop=LayerLoop.IN_PLACE))
    assert not weight_copies(make_compiler(loop=LayerLoop.SWITCH))
    assert weight_copies(make_compiler(loop=LayerLoop.SCAN)), "the pattern must see copies, or it proves nothing"


def test_few_plain_programs_on_cpu_by_default() -> None:
    compiler = make_compiler(max_num_batched_tokens=512, max_num_seqs=256)
    assert sum(shape.sampling is Sampling.PLAIN for shape in compiler.shapes.steps()) == 7


def test_programs_come_from_the_least_to_the_most() -> None:
    kinds = [shape.sampling for shape in make_compiler().shapes.programs() if isinstance(shape, StepShape)]
    assert set(kinds) == set(Sampling)
    assert kinds == sorted(kinds, key=list(Sampling).index)


def test_programs_that_sample_more_can_run_a_step_too() -> None:
    compiler = make_compiler()
    larger = compiler.shapes.larger(compiler.shapes.step_shape(compiler.shapes.buckets[0], Sampling.TRUNCATED))
    kinds = (Sampling.TRUNCATED, Sampling.FULL)
    by_bucket = [(bucket, kind) for bucket in compiler.shapes.buckets for kind in kinds]
    assert [(shape.batch.bucket, shape.sampling) for shape in larger] == by_bucket[1:]
    assert compiler.shapes.larger(compiler.shapes.step_shape(compiler.shapes.buckets[-1], Sampling.FULL)) == []


def test_decodes_alone_have_programs_where_attention_takes_less_for_them() -> None:
    attention = PagedAttention(AttentionShape(4, 2, 64, 16, jnp.dtype("bfloat16"), jnp.dtype("bfloat16")), "gpu")
    compiler = make_compiler(dtype=jnp.bfloat16, groups=(replace(make_group(), attention=attention),))
    decodes = [shape for shape in compiler.shapes.steps() if shape.decodes_only]
    assert [shape.batch.bucket for shape in decodes] == [Bucket(16, 16), Bucket(32, 32), Bucket(64, 64)] * 2
    assert [shape.sampling for shape in decodes] == [Sampling.PLAIN] * 3 + [Sampling.TRUNCATED] * 3
    for shape in decodes:
        bucket = shape.batch.bucket
        assert shape == compiler.shapes.step_shape(bucket, shape.sampling, has_chunks=False)
        mixed = compiler.shapes.step_shape(bucket, shape.sampling, has_chunks=True)
        larger = [each for each in compiler.shapes.larger(shape) if each.sampling is shape.sampling]
        assert larger[0] == mixed
        assert larger[1:] == [
            compiler.shapes.step_shape(each, shape.sampling, has_chunks=has_chunks)
            for each in compiler.shapes.buckets[compiler.shapes.buckets.index(bucket) + 1 :]
            for has_chunks in ([False, True] if each.num_tokens == each.num_seqs else [True])
        ]
        assert not any(each.decodes_only for each in compiler.shapes.larger(mixed)), "they take no chunks"
        assert mixed in compiler.shapes.steps(), "a prompt may be short enough for the same bucket"
        assert not mixed.decodes_only
        assert not compiler.shapes.step_shape(bucket, Sampling.FULL, has_chunks=False).decodes_only
    assert not any(shape.decodes_only for shape in make_compiler().shapes.steps())


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_on_an_accelerator_the_largest_programs_come_first(platform: str) -> None:
    """They stand in for the others, which take seconds to compile."""
    attention = PagedAttention(AttentionShape(4, 2, 64, 16, jnp.dtype("bfloat16"), jnp.dtype("bfloat16")), platform)
    groups = (replace(make_group(), attention=attention),)
    compiler = make_compiler(dtype=jnp.bfloat16, groups=groups, platform=platform)
    assert compiler.shapes.has_stand_ins
    shapes = compiler.shapes.steps()
    plain = [shape for shape in shapes if shape.sampling is Sampling.PLAIN]
    assert shapes[: len(plain)] == plain
    buckets = [shape.batch.bucket for shape in plain]
    assert buckets[:2] == [compiler.shapes.buckets[-1], Bucket(64, 64)]
    for shape in shapes:
        first = next(each for each in shapes if each.sampling is shape.sampling)
        assert shape == first or first in compiler.shapes.larger(shape)
    if platform == "gpu":
        decodes = [shape for shape in plain if shape.decodes_only]
        assert plain[1] == decodes[0]
        assert all(decodes[0] in compiler.shapes.larger(shape) for shape in decodes[1:])
    rest = [bucket for bucket in dict.fromkeys(buckets[1:]) if bucket != Bucket(64, 64)]
    assert rest == sorted(rest), "then the smallest"
    programs = compiler.shapes.programs()
    first = [program for program in programs[:5] if isinstance(program, StepShape)]
    assert [program.sampling for program in first] == [Sampling.PLAIN, Sampling.TRUNCATED] * 2 + [Sampling.FULL]
    assert [program.batch.bucket for program in first] == [*buckets[:1] * 2, *[Bucket(64, 64)] * 2, *buckets[:1]]
    assert len(set(programs)) == len(programs)
    assert {program for program in programs if isinstance(program, StepShape)} == set(shapes)
    assert programs.index(Upkeep.COPY_BLOCKS) < len(first) + len(Upkeep), "steps wait for the small ones too"


def test_nothing_compiles_after_warm_up() -> None:
    """The workload touches every bucket and every sampling feature, with chunks, decodes and hits."""
    llm = LLM(
        str(folder("llama3_tied")), dtype="float32", skip_tokenizer_init=True, block_size=16, max_num_batched_tokens=32,
        max_num_seqs=16, cudagraph_capture_sizes=[8],
    )  # fmt: skip
    features = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, seed=5),
        SamplingParams(n=3),
        SamplingParams(top_k=3, top_p=0.9, min_p=0.01),
        SamplingParams(logprobs=3),
        SamplingParams(min_tokens=3, stop_token_ids=[7, 8]),
        SamplingParams(stop_token_ids=[5], ignore_eos=True),
    ]
    llm.llm_engine.warm_up()
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 3 + 1)(1.0)
        assert compiled, "the listener must see compiles, or it proves nothing"
        compiled.clear()
        for params in features:
            params.max_tokens, params.detokenize = 6, False
            for num_prompts, length in ((1, 3), (2, 7), (3, 40), (16, 5), (40, 20)):
                prompts = [TokensPrompt(prompt_token_ids=[i % 250 + 1] * length) for i in range(num_prompts)]
                llm.generate(prompts, params, use_tqdm=False)
        assert not compiled
    finally:
        jax.monitoring.clear_event_listeners()
        llm.shutdown()

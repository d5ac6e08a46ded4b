"""scripts/compile/steps.py: the programs that are compiled of each kind of model, and what is found in them."""

from __future__ import annotations

import jax
import pytest
from compile.compiled_step import find_host_calls
from compile.steps import CLIPS, ENCODERS, find_frame_scores, find_programs, make_compiler
from lib.shapes import GENERATION_CONFIGS, MODELS

from jaxllm.execution.encoders.alignment import AlignShape
from jaxllm.execution.encoders.clips import ClipShape
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.step import StepShape

pytestmark = pytest.mark.scripts

FRAMES = 1500


def compiler_of(name: str, num_layers: int | None = 4) -> StepCompiler:
    return make_compiler(name, mesh=make_mesh(jax.devices()[:1]), num_layers=num_layers, is_quantized=False)


@pytest.mark.parametrize(("name", "num_heads"), [("whisper-large-v3", 1), ("whisper-large-v3-turbo", 4)])
def test_programs_of_a_model_that_hears(name: str, num_heads: int) -> None:
    compiler = compiler_of(name, None)
    programs = find_programs(compiler)
    assert [programs[title] for title in CLIPS] == [
        ClipShape(FRAMES), AlignShape(64, num_heads), AlignShape(448, num_heads),
    ]  # fmt: skip
    decode, smallest = programs["decode"], programs["smallest"]
    assert isinstance(decode, StepShape)
    assert isinstance(smallest, StepShape)
    assert (decode.batch.bucket.num_seqs, smallest.batch.bucket.num_seqs) == (32, compiler.shapes.buckets[0].num_seqs)
    assert decode.batch.first_timestamp == 50_365, "the rules of transcripts are on"
    assert all(step.batch.cross for step in (decode, smallest))


def test_few_layers_take_all_heads_of_the_later_half() -> None:
    assert "alignment_heads" in GENERATION_CONFIGS["whisper-large-v3"]
    assert compiler_of("whisper-large-v3").shapes.align_shapes[0] == AlignShape(
        64, MODELS["whisper-large-v3"]["d_model"] // 64
    )


def test_other_models_have_no_such_programs() -> None:
    assert not find_programs(compiler_of("llama-3.2-1b", 2)).keys() & {*CLIPS, *ENCODERS}
    seeing = find_programs(compiler_of("qwen3-vl-8b", 2))
    assert {*ENCODERS} <= seeing.keys()
    assert not seeing.keys() & {*CLIPS}


@pytest.mark.parametrize("size", [FRAMES, 1536])
def test_scores_of_frames_are_found(size: int) -> None:
    scores = f"  %dot.1 = f32[20,{FRAMES},{size}]{{2,1,0}} dot(%q, %k)"
    rest = f"  %x = bf16[{size},1280]{{1,0}} fusion(%y)\n  %w = bf16[{size},2560]{{1,0}} dot(%x, %v)"
    assert find_frame_scores(f"{scores}\n{rest}", FRAMES) == [f"f32[20,{FRAMES},{size}]"]
    assert find_frame_scores(rest, FRAMES) == []


def test_calls_of_the_host_are_found() -> None:
    calls = """
  %out = token[] outfeed(%x, %token), outfeed_shape=f32[8]
  %call = f32[8] custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"
  %kernel = f32[8] custom-call(%x), custom_call_target="mosaic_gpu_v2"
  %near = (f32[8], u32[], token[]) recv(%token), channel_id=1
  %far = (f32[8], u32[], token[]) recv(%token), channel_id=2, is_host_transfer=true"""
    assert sorted(find_host_calls(calls)) == ["outfeed", "recv", "xla_ffi_python_gpu_callback"]

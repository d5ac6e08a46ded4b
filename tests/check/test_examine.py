"""`jaxllm check` from arguments to report, with the CPU for hardware: the engine's own numbers, and what would fit."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import msgspec
import pytest

from jaxllm import LLM
from jaxllm.check import examine as examining
from jaxllm.check import fitting
from jaxllm.check.examine import _notes, examine
from jaxllm.check.fitting import fit
from jaxllm.check.report import Change, Collective, Report
from jaxllm.check.table import render
from jaxllm.engine.core import startup
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.mesh import param_bytes
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.loading.open import open_config
from pallas_kernels.paged_attention import PagedAttention
from tests.check.support import MODEL, TOY, add_toy, engine_args
from tests.e2e.inside import core_of
from tests.e2e.media_goldens import folder as media_folder
from tests.e2e.sound_goldens import folder as sound_folder
from tests.models.tiny import folder, read_hf_config

pytestmark = pytest.mark.programs


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy(monkeypatch)


@pytest.fixture
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports say nothing of a processor that the CPU's kernels are not for."""
    monkeypatch.setattr(PagedAttention, "missing_kernels", lambda *_: None)


@pytest.fixture(scope="module")
def report() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        add_toy(patch)
        return examine(engine_args(), "toy:1x1")


def test_the_engine_gets_as_many_blocks_as_the_report_names(report: Report, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(startup, "memory_limit", lambda config: TOY.memory_limit(config.args.gpu_memory_utilization))
    args = dataclasses.asdict(engine_args(enforce_eager=True))
    with LLM(**args) as llm:
        runner = core_of(llm)._runner
        assert isinstance(runner, ModelRunner)
        [pool], num_layers = runner.launcher.pools, llm.model_config.hf_config.num_hidden_layers
        params = sum(array.nbytes for array in jax.tree.leaves(runner.launcher.params))
        assert {array.shape[0] // num_layers for array in pool} == {report.memory.num_blocks}
        assert sum(array.nbytes for array in pool) == report.memory.kv_cache
        assert params == report.memory.params
    assert 50 < report.memory.num_blocks < 8 * 16 + 1  # the memory decides, not max_num_seqs


def test_memory_adds_up(report: Report):
    memory = report.memory
    assert memory.scratch is not None
    left = memory.limit - memory.params - memory.scratch - memory.kv_cache
    assert 0 <= left < 16 * memory.groups[0].block  # the number of blocks is rounded down to 16
    hf = read_hf_config("llama3_tied")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    assert memory.groups[0].block == 2 * 4 * 16 * hf["num_hidden_layers"] * hf["num_key_value_heads"] * head_dim
    assert memory.limit == TOY.memory_bytes * 9 // 10


def test_images_cost_rows_and_memory(monkeypatch: pytest.MonkeyPatch, any_processor: None):
    add_toy(monkeypatch, dataclasses.replace(TOY, memory_bytes=60_000_000, usable_bytes=60_000_000))
    model = str(media_folder("mistral3"))
    report = examine(engine_args(model=model, max_num_batched_tokens=64), "toy:1x1")
    assert report.media is not None
    small, large = report.media.pictures
    # 12 x 12 patches; squares of 2 x 2 become a row.
    assert (small.side, small.rows, large.rows) == (448, 36, 36)
    assert (report.media.cache_rows, report.media.cache) == (64, 64 * 64 * 4)
    assert 0 < report.media.tower_params < report.memory.params
    names = [program.name for program in report.programs if program.name.startswith("encode")]
    assert names == ["encode the largest image"]
    assert "takes 36 rows" in render(report)
    fewer = dataclasses.replace(report.media, cache_rows=35)
    assert "refused" in render(dataclasses.replace(report, media=fewer))


def test_sounds_cost_rows_and_memory(monkeypatch: pytest.MonkeyPatch, any_processor: None):
    add_toy(monkeypatch, dataclasses.replace(TOY, memory_bytes=60_000_000, usable_bytes=60_000_000))
    report = examine(engine_args(model=str(sound_folder("voxtral")), max_num_batched_tokens=64), "toy:1x1")
    assert report.media is not None
    # A clip of 2 s has 100 frames, and four become a row.
    assert [(sound.seconds, sound.rows) for sound in report.media.sounds] == [(10.0, 125), (600.0, 7500)]
    assert (report.media.pictures, report.media.cache_rows, report.media.cache) == ([], 256, 256 * 64 * 4)
    assert [program.name for program in report.programs if "encode" in program.name] == ["encode a whole clip"]
    assert "a sound of 10 s takes 125 rows\n" in render(report)
    assert "a sound of 600 s takes 7,500 rows: refused" in render(report)


def test_requests_at_once(report: Report):
    [longest] = report.concurrency
    assert (longest.length, longest.requests) == (256, (report.memory.num_blocks - 1) // 16)


def test_bounds_are_of_the_requests_that_fit(report: Report):
    decode = [bound.batch for bound in report.bounds if bound.phase == "decode"]
    assert decode == [1, report.concurrency[0].requests]
    assert [bound.length for bound in report.bounds if bound.phase == "prefill"] == [256]


def test_the_json_has_the_form_of_a_report(report: Report):
    schema = msgspec.json.schema(Report)
    document = json.loads(msgspec.json.encode(report))
    jsonschema.validate(document, schema)
    assert set(schema["$defs"]["Report"]["required"]) <= set(document)
    assert document["fits"] is True
    assert [program["num_tokens"] for program in document["programs"]] == [8, 16, 16]
    assert msgspec.json.decode(json.dumps(document), type=Report) == report


def test_the_table_names_what_was_found(report: Report):
    text = render(report)
    assert text.startswith(f"FITS: {MODEL} (LlamaForCausalLM) on toy:1x1, 1 of 1 device (cpu)\n")
    assert f"{report.memory.num_blocks:,} KV blocks of 16 tokens" in text
    assert "Bounds, not predictions" in text


def test_the_table_says_how_far_back_layers_attend(report: Report):
    [group] = report.memory.groups
    bounded = [dataclasses.replace(group, window=1024), dataclasses.replace(group, attention_chunk=8192)]
    text = render(dataclasses.replace(report, memory=dataclasses.replace(report.memory, groups=[group, *bounded])))
    for reach in ("", ", window 1,024", ", within chunks of 8,192"):
        assert f"KV blocks of 16 tokens{reach}, {group.block:,} bytes each" in text


def test_layers_that_attend_within_chunks_have_fewer_blocks(any_processor: None):
    args = engine_args(model=str(folder("llama4")), max_num_seqs=2, max_num_batched_tokens=16)
    report = examine(args, "toy:1x1")
    chunked, full = report.memory.groups
    assert (chunked.num_layers, chunked.attention_chunk, full.num_layers, full.attention_chunk) == (3, 32, 1, None)
    assert chunked.block == 3 * full.block
    # A sequence reads the 2 blocks of a chunk at most, and a step has a block: with a quarter more, and the null block.
    assert (chunked.num_blocks, full.num_blocks) == (1 + 7, report.memory.num_blocks)
    assert report.memory.kv_cache == chunked.num_blocks * chunked.block + full.num_blocks * full.block


def test_the_table_shows_collectives_and_notes(report: Report):
    collectives = [
        Collective(kind="all-reduce", count=33, bytes=1000, repeated=False),
        Collective(kind="all-gather", count=2, bytes=20, repeated=True),
    ]
    programs = [dataclasses.replace(report.programs[0], collectives=collectives)]
    lines = render(dataclasses.replace(report, programs=programs, notes=["look"])).splitlines()
    assert ["all-reduce", "33", "1,000"] in [line.split() for line in lines]
    assert any(line.split()[-2:] == ["2", "20"] and "each pass of a loop" in line for line in lines)
    assert lines[-1] == "Note: look"


def test_what_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch, report: Report):
    used, block = report.memory.params + 100_000, report.memory.groups[0].block
    monkeypatch.setattr(StepCompiler, "used_bytes", lambda _: used)  # as if compiled
    small = dataclasses.replace(TOY, memory_bytes=int((used + 12.6 * block) / 0.9), usable_bytes=2 * used)
    add_toy(monkeypatch, small)
    outcome = examine(engine_args(), "toy:1x1")
    assert not outcome.fits
    assert "less than max_model_len=256" in (outcome.reason or "")
    assert (outcome.programs, outcome.memory.num_blocks, outcome.concurrency, outcome.bounds) == ([], 0, [], [])
    # 12 blocks of 16 tokens, one of them the null block; 8-bit keys and values take a quarter of float32.
    assert [(change.settings, change.num_blocks) for change in outcome.changes] == [
        ({"max_model_len": 11 * 16}, 12),
        ({"kv_cache_dtype": "fp8"}, 50),
    ]
    for change in outcome.changes:
        checkpoint = open_config(MODEL)
        assert fit(engine_args(**change.settings), checkpoint, small, jax.devices()[:1]).num_blocks == change.num_blocks
    assert "--max-model-len 176" in render(outcome)


def test_a_larger_topology_is_proposed_only_where_nothing_else_helps(monkeypatch: pytest.MonkeyPatch, report: Report):
    """The parameters are too many for one device but not for two."""
    monkeypatch.setattr(StepCompiler, "used_bytes", lambda self: report.memory.params // self.mesh.size + 100_000)
    add_toy(monkeypatch, dataclasses.replace(TOY, memory_bytes=report.memory.params))
    failed = fit(engine_args(), open_config(MODEL), TOY, jax.devices()[:1])
    hardware = dataclasses.replace(TOY, layouts=("1x1", "1x2", "2x2"))  # 6 heads do not spread over 4
    assert list(fitting._more_devices(engine_args(), failed, hardware, "toy:1x1")) == [
        ({"topology": "toy:1x2", "tensor_parallel_size": 2}, "toy:1x2"),
    ]
    assert list(fitting._more_devices(engine_args(), failed, hardware, "toy:2x2")) == [
        ({"tensor_parallel_size": 2}, "toy:2x2"),
    ]


@pytest.mark.usefixtures("any_processor")
def test_too_many_parameters(monkeypatch: pytest.MonkeyPatch, report: Report):
    add_toy(monkeypatch, dataclasses.replace(TOY, memory_bytes=report.memory.params, layouts=("1x1",)))
    outcome = examine(engine_args(), "toy:1x1")
    assert (outcome.fits, outcome.memory.scratch, outcome.changes, outcome.notes) == (False, None, [], [])
    assert "The parameters alone take" in (outcome.reason or "")
    assert "scratch" not in render(outcome)


def test_parameters_that_fit_in_int8(monkeypatch: pytest.MonkeyPatch, report: Report):
    monkeypatch.setattr(StepCompiler, "used_bytes", lambda self: param_bytes(self.mesh, self.model.specs.param_specs()))
    params = 2 * report.memory.params  # in plain XLA, which holds weights in float32
    add_toy(monkeypatch, dataclasses.replace(TOY, memory_bytes=params, layouts=("1x1",)))
    plain = {"attention_config": {"backend": "xla"}}
    outcome = examine(engine_args(**plain), "toy:1x1")
    assert "or set quantization='int8'" in (outcome.reason or "")
    assert [change.settings for change in outcome.changes] == [{"quantization": "int8"}]
    assert examine(engine_args(**plain, quantization="int8"), "toy:1x1").memory.params < 0.3 * params


def test_a_cache_that_the_user_made_too_large(monkeypatch: pytest.MonkeyPatch, report: Report):
    monkeypatch.setattr(StepCompiler, "used_bytes", lambda _: report.memory.params)
    outcome = examine(engine_args(num_gpu_blocks_override=10_000), "toy:1x1")
    assert not outcome.fits
    assert re.match(r"num_gpu_blocks_override=10000 blocks take .* lower it to \d+ or less", outcome.reason or "")


def test_replicas_need_devices_of_their_own(monkeypatch: pytest.MonkeyPatch):
    add_toy(monkeypatch)
    with pytest.raises(VLLMValidationError, match="1 devices, too few for 2 replicas of 1 each") as caught:
        examine(engine_args(data_parallel_size=2), "toy:1x1")
    assert caught.value.parameter == "data_parallel_size"
    with pytest.raises(VLLMValidationError, match="needs as many devices, but there are 1") as caught:
        examine(engine_args(tensor_parallel_size=2), "toy:1x1")
    assert caught.value.parameter == "tensor_parallel_size"


def test_figures_are_one_replicas(report: Report, monkeypatch: pytest.MonkeyPatch):
    add_toy(monkeypatch)
    outcome = examine(engine_args(data_parallel_size=4), "toy:2x2")
    assert outcome.notes[0].startswith("These are the figures of one of 4 replicas")
    assert outcome.memory == report.memory


@pytest.mark.usefixtures("any_processor")
def test_more_than_one_host_is_noted():
    config = engine_args().create_engine_config()
    change = Change(settings={"tensor_parallel_size": 2}, num_blocks=9, max_model_len=9)
    assert list(_notes(config, TOY, [])) == []
    assert list(_notes(config, TOY, [change])) == ["2 devices of toy are on 2 hosts: run it on each, with --nnodes 2."]


def test_attention_in_plain_xla_is_noted_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    config = engine_args().create_engine_config()
    bfloat16 = jnp.dtype("bfloat16")
    [group] = config.kv_groups
    shape = group.attention.shape._replace(head_dim=64, dtype=bfloat16, kv_dtype=bfloat16)

    def with_shape(config: Any, shape: Any) -> Any:
        groups = (dataclasses.replace(group, attention=PagedAttention(shape)),)
        return dataclasses.replace(config, ops=config.ops._replace(kv_groups=groups))

    on_gpu = with_shape(dataclasses.replace(config, platform="gpu"), shape)
    monkeypatch.setattr(examining, "detect_architecture", lambda _: "7.5")
    [note] = _notes(on_gpu, TOY, [])
    assert note.startswith("attention runs in plain XLA, not in the gpu's own kernels: ")
    assert note.endswith("this GPU has compute capability 7.5.")
    monkeypatch.setattr(examining, "detect_architecture", lambda _: "9.0")
    assert list(_notes(on_gpu, TOY, [])) == []  # the user chose it
    odd = with_shape(on_gpu, shape._replace(head_dim=80))
    assert [note.endswith("head_dim must be 64, 128 or 256, not 80.") for note in _notes(odd, TOY, [])] == [True]


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"model": "./nothing-here"}, "model"),
        ({"logits_processors": ["tests.e2e.test_host_processors:Forced"]}, "logits_processors"),
    ],
)
def test_what_no_hardware_could_run_is_misuse(changes: dict, parameter: str):
    with pytest.raises(VLLMValidationError) as error:
        examine(engine_args(**changes), "toy:1x1")
    assert error.value.parameter == parameter


def test_what_takes_long_is_told_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(examining, "TELL_SECONDS", 0.01)
    with caplog.at_level("INFO", logger="jaxllm"), examining._telling("a step"):
        deadline = time.monotonic() + 10
        while "still compiling a step" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "still compiling a step, for 0 s" in caplog.text

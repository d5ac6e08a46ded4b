"""Profiles of the requested steps are written to the folder; options that JAX's profiler lacks are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm.config import ProfilerConfig
from jaxllm.engine.core.profiler import StepProfiler
from jaxllm.exceptions import VLLMValidationError
from jaxllm.llm import LLM
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import SamplingParams
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import make_llm


def profiled_core(folder: Path, **settings: Any) -> FakeCore:
    config = ProfilerConfig(profiler="torch", torch_profiler_dir=str(folder), **settings)
    return FakeCore(hashed_tokens, profiler=StepProfiler(config))


def profiled_llm(folder: Path, **settings: Any) -> LLM:
    return make_llm(profiled_core(folder, **settings), None)


def generate(llm: LLM, num_steps: int) -> None:
    llm.generate([1, 2, 3], SamplingParams(max_tokens=num_steps), use_tqdm=False)


def test_a_trace_lands_in_the_folder(tmp_path: Path) -> None:
    llm = profiled_llm(tmp_path / "new", torch_profiler_with_stack=False)
    llm.start_profile("warm-1")
    with pytest.raises(VLLMValidationError, match="A profiling session is already active"):
        llm.start_profile()
    generate(llm, 2)
    llm.stop_profile()
    (session,) = (tmp_path / "new" / "plugins" / "profile").iterdir()
    assert session.name.startswith("warm-1_")
    assert {path.name.partition(".")[2] for path in session.iterdir()} == {"xplane.pb", "trace.json.gz"}


@pytest.mark.parametrize(
    ("config", "call", "recorded"),
    [
        ({}, {}, [0, 1, 2, 3, 4, 5]),
        ({"delay_iterations": 2, "max_iterations": 3}, {}, [2, 3, 4]),
        ({"delay_iterations": 2, "max_iterations": 3}, {"delay_iterations": 0, "max_iterations": 1}, [0]),
        ({"max_iterations": 3}, {"delay_iterations": 4, "max_iterations": 0}, [4, 5]),
    ],
)
def test_which_steps_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, int], call: dict[str, Any], recorded: list[int]
) -> None:
    switches: list[str] = []
    seen: list[int] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_args, **_options: switches.append("on"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: switches.append("off"))
    core = profiled_core(tmp_path, **config)
    core.before_step = lambda step: seen.append(step) if switches[-1:] == ["on"] else None
    llm = make_llm(core, None)
    llm.start_profile(**call)
    generate(llm, 6)
    llm.stop_profile()
    assert (seen, switches) == (recorded, ["on", "off"])
    llm.start_profile(delay_iterations=0)
    llm.shutdown()
    assert switches == ["on", "off"] * 2, "a profile is written when the engine ends"


def test_without_a_profiler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(FakeCore(hashed_tokens), None)
    for call in (llm.start_profile, llm.stop_profile):
        with pytest.raises(VLLMValidationError, match=r"Profiling is not enabled\. Give the engine"):
            call()
    profiled_llm(tmp_path).stop_profile()
    assert "not started" in caplog.text


@pytest.mark.parametrize("prefix", ["", "../up", "a b", "-a", "é", "a" * 129, 3])
def test_prefixes_are_names(tmp_path: Path, prefix: Any) -> None:
    llm = profiled_llm(tmp_path)
    with pytest.raises(VLLMValidationError, match="profile_prefix must be 1-128 ASCII characters"):
        llm.start_profile(prefix)
    with pytest.raises(VLLMValidationError, match="delay_iterations must be at least 0"):
        llm.start_profile(delay_iterations=-1)


def read(settings: Any) -> ProfilerConfig | None:
    return EngineArgs(model="m", profiler_config=settings).profiler_config


def test_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "profiler": "torch",
        "torch_profiler_dir": "traces",
        "max_iterations": 4,
        "torch_profiler_use_gzip": True,
    }
    assert read(settings) == ProfilerConfig("torch", str(tmp_path / "traces"), max_iterations=4)
    assert read(None) is None


TORCH = {"profiler": "torch", "torch_profiler_dir": "x"}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"profiler": "cuda"}, "profiler='cuda' is not supported; use 'torch', which is JAX's"),
        ({"profiler": "torch"}, "torch_profiler_dir must be set when profiler is 'torch'"),
        ({"torch_profiler_dir": "x"}, "torch_profiler_dir is only applicable when profiler is set to 'torch'"),
        ({"profiler": "torch", "torch_profiler_dir": "gs://x"}, "must be a folder of this machine"),
        ({"profiler": "torch", "torch_profiler_dir": 3}, "torch_profiler_dir must be a string"),
        ({**TORCH, "max_iterations": -1}, "max_iterations must be at least 0"),
        ({**TORCH, "torch_profiler_with_stack": 1}, "torch_profiler_with_stack must be True or False"),
        ({**TORCH, "active_iterations": 6}, "active_iterations=6 is not supported: see delay_iterations"),
        ({**TORCH, "proton_mode": "pcsampling"}, "proton_mode='pcsampling' is not supported: it belongs to Triton"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as error:
        read(settings)
    assert error.value.parameter == "profiler_config"


def test_fields_are_vllms() -> None:
    assert sorted(field.name for field in dataclasses.fields(ProfilerConfig)) == [
        "active_iterations",
        "capture_torch_profiler",
        "delay_iterations",
        "detailed_trace_annotation",
        "ignore_frontend",
        "max_iterations",
        "profiler",
        "proton_backend",
        "proton_context",
        "proton_data",
        "proton_graph_attribution",
        "proton_hook",
        "proton_mode",
        "proton_output_format",
        "proton_profiler_dir",
        "torch_profiler_activities",
        "torch_profiler_dir",
        "torch_profiler_dump_cuda_time_total",
        "torch_profiler_record_shapes",
        "torch_profiler_use_gzip",
        "torch_profiler_with_flops",
        "torch_profiler_with_memory",
        "torch_profiler_with_stack",
        "wait_iterations",
        "warmup_iterations",
    ]

"""The process that compiles: what is refused before it starts, what it is told, and what comes back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from jax.experimental import topologies

from jaxllm.check import compilers, process
from jaxllm.check.compilers import compiler_environment, find_ptxas, require_compiler
from jaxllm.check.process import Request, ask
from jaxllm.config.groups import AttentionConfig
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.hardware import HARDWARE, find_topology
from jaxllm.utils import child_process
from jaxllm.utils.child_process import ChildError
from tests.check.support import engine_args


@pytest.mark.parametrize(("name", "package"), [("v5e", "libtpu"), ("h100", "jax-cuda13-plugin")])
def test_a_missing_compiler_is_named_with_its_install_line(name: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilers, "_is_there", lambda _module: False)
    with pytest.raises(VLLMValidationError, match=rf"needs {package}.* pip install 'jaxllm\[check\]'$") as error:
        require_compiler(HARDWARE[name])
    assert error.value.parameter == "topology"


def test_ptxas_is_the_one_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packaged, other = tmp_path / "nvidia" / "cu13" / "bin" / "ptxas", tmp_path / "path" / "ptxas"
    for file in (packaged, other):
        file.parent.mkdir(parents=True)
        file.write_text("")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    monkeypatch.setattr(compilers, "_nvidia_folders", lambda: iter([tmp_path / "nvidia"]))
    assert find_ptxas() == packaged
    path = compiler_environment(HARDWARE["h100"], {"PATH": "elsewhere"})["PATH"]
    assert path == f"{packaged.parent}:elsewhere"
    monkeypatch.setattr(compilers, "_nvidia_folders", lambda: iter([]))
    assert find_ptxas() == other
    other.unlink()
    monkeypatch.setattr(compilers, "_is_there", lambda _module: True)
    with pytest.raises(VLLMValidationError, match="ptxas"):
        require_compiler(HARDWARE["h100"])


def test_the_process_touches_no_device():
    for name in ("v5e", "h100"):
        environment = compiler_environment(HARDWARE[name], {"JAX_PLATFORMS": "tpu", "HOME": "somewhere"})
        assert environment["JAX_PLATFORMS"] == "cpu"
        assert environment["HOME"] == "somewhere"
    assert compiler_environment(HARDWARE["h100"], {})["CUDA_VISIBLE_DEVICES"] == ""
    assert compiler_environment(HARDWARE["v5e"], {})["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (
            "v4:2x2x1",
            {"chip_config_name": "megacore"},
        ),  # else libtpu describes two devices a chip, which no runtime has
        ("v5p:2x2x1", {}),
        ("v5e:1x1", {"chips_per_host_bounds": [1, 1, 1]}),
        ("tpu7x:1x1x1", {"chips_per_host_bounds": [1, 1, 1]}),
    ],
)
def test_what_libtpu_is_told_of_a_topology(topology: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    told: dict[str, Any] = {}

    def describe(**fields: Any) -> Any:
        told.update(fields)
        return SimpleNamespace(devices=[])

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    hardware, num_devices = find_topology(topology)
    compilers.describe_devices(hardware, topology, num_devices)
    assert told == {"platform": "tpu", "topology_name": topology} | options


def test_more_devices_than_the_topology_has():
    with pytest.raises(VLLMValidationError, match="more than the 4 devices of v5e:2x2") as error:
        ask(engine_args(tensor_parallel_size=8), "v5e:2x2")
    assert error.value.parameter == "tensor_parallel_size"


def test_arguments_cross_over():
    args = engine_args(
        kv_cache_dtype="fp8", hf_overrides={"rope_theta": 5.0}, attention_config=AttentionConfig(backend="xla"),
        gpu_memory_utilization=0.5, max_model_len="1k",
    )  # fmt: skip
    request = Request(topology="v5e:2x2", engine_args=args.portable())
    read = msgspec.json.decode(msgspec.json.encode(request), type=Request)
    assert EngineArgs(**read.engine_args) == args
    assert "seed" not in read.engine_args
    assert set(EngineArgs(model="x").portable()) == {"model"}


@pytest.mark.programs
def test_an_error_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch):
    """The process is a real one, which does not get as far as a compiler."""
    monkeypatch.setattr(process, "require_compiler", lambda _hardware: None)
    with pytest.raises(VLLMValidationError, match="neither a folder nor a file") as error:
        ask(dataclasses.replace(engine_args(), model="./nothing-here"), "v5e:1x1")
    assert error.value.parameter == "model"


@pytest.mark.programs
def test_a_process_that_dies_is_not_an_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "require_compiler", lambda _hardware: None)
    monkeypatch.setattr(child_process.sys, "executable", "false")
    with pytest.raises(ChildError, match=r"jaxllm\.check ended with status 1"):
        ask(engine_args(), "v5e:1x1")

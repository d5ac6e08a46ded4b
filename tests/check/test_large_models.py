"""Models of 300 billion parameters are planned on 16 TPUs and 8 GPUs, from config.json; nothing is compiled here."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from check.architectures import Device
from lib.shapes import HUB_IDS, MODELS

from jaxllm.check.fitting import fit
from jaxllm.execution.mesh import param_bytes
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.loading.open import open_config
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.hardware import find_topology

pytestmark = pytest.mark.programs

SCRATCH = 1 << 30
"""More than compilers need for the largest step: see benchmarks/results/check."""


def used_bytes(compiler: StepCompiler) -> int:
    """Return the bytes of a step with a fixed scratch, in place of a compiler's."""
    return param_bytes(compiler.mesh, compiler.model.specs.all_param_specs()) + SCRATCH


@pytest.mark.parametrize("topology", ["v5p:2x2x4", "h200:8"])
@pytest.mark.parametrize(("name", "num_groups", "bytes_per_weight"), [("mimo-v2-flash", 2, 1), ("hy3", 1, 2)])
def test_a_large_model_fits(
    name: str,
    num_groups: int,
    bytes_per_weight: int,
    topology: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(StepCompiler, "used_bytes", used_bytes)
    folder = tmp_path / HUB_IDS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    hardware, num_devices = find_topology(topology)
    facts = {"compute_capability": "9.0", "core_count": 132} if hardware.platform == "gpu" else {}
    devices = [Device(hardware.platform, hardware.device_kind, **facts) for _ in range(num_devices)]
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, tensor_parallel_size=num_devices)
    with caplog.at_level(logging.WARNING):
        sized = fit(args, open_config(str(folder)), hardware, devices)
    assert sized.reason is None
    assert "plain XLA" not in caplog.text
    assert len(sized.config.kv_groups) == num_groups
    assert sized.size.memory is not None
    billions = {"mimo-v2-flash": 309, "hy3": 295}[name]
    whole = billions * 1e9 * bytes_per_weight / num_devices
    assert whole < sized.size.memory.params < 1.2 * whole
    tokens = sized.num_blocks * sized.config.block_size
    assert tokens > 4 * sized.config.max_model_len

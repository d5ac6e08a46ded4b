"""The table of hardware says what devices have, and an engine uses its part of a device's memory."""

from __future__ import annotations

import logging
import re

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.hardware import HARDWARE, Hardware, find_topology, real_memory_limit
from pallas_kernels.targets import gpu_target, gpu_targets

V5E, H100 = HARDWARE["v5e"], HARDWARE["h100"]


@pytest.mark.parametrize(
    ("topology", "kind", "num_devices"),
    [
        ("v5e:2x2", "v5e", 4),
        ("v6e:2x4", "v6e", 8),
        ("v5p:2x2x2", "v5p", 8),
        ("tpu7x:2x2x1", "tpu7x", 8),  # a chip is two devices
        ("h100", "h100", 1),
        ("h100:8", "h100", 8),
        ("h100:32", "h100", 32),
        ("v4:2x2x1", "v4", 4),
        ("h200", "h200", 1),
        ("gb300:4", "gb300", 4),
        ("rtx4090:2", "rtx4090", 2),
        ("rtx3090", "rtx3090", 1),
    ],
)
def test_topologies(topology: str, kind: str, num_devices: int):
    assert find_topology(topology) == (HARDWARE[kind], num_devices)


@pytest.mark.parametrize("name", ["v5e", "v5e:3x3", "v7x:2x2x1", "h100:3", "gb300:8", "a10", ""])
def test_an_unknown_topology_is_refused_with_the_known_ones(name: str):
    with pytest.raises(VLLMValidationError, match=r"Known are v4:2x2x1, .*tpu7x:2x2x1.*; h100, h100:2") as error:
        find_topology(name)
    assert (error.value.parameter, error.value.value) == ("topology", name)


@pytest.mark.parametrize(
    ("topology", "num_hosts"),
    [("v6e:2x4", 1), ("v6e:4x4", 4), ("v5p:2x4x4", 8), ("tpu7x:2x2x2", 2), ("h100:8", 1), ("h100:32", 4)],
)
def test_hosts_of_a_topology(topology: str, num_hosts: int):
    hardware, num_devices = find_topology(topology)
    assert hardware.num_hosts(num_devices) == num_hosts


def test_topologies_ascend():
    for hardware in HARDWARE.values():
        counts = list(hardware.topologies().values())
        assert counts == sorted(set(counts))


GPUS = [hardware for hardware in HARDWARE.values() if hardware.platform == "gpu"]
FLOPS_PER_CYCLE = {
    "a100": 2048, "h100": 4096, "h200": 4096, "b200": 8192, "gb300": 8192,
    "l4": 1024, "l40s": 1024, "rtx3090": 512, "rtx4090": 512, "rtx5090": 512,
}  # fmt: skip
"""The dense bfloat16 operations of one core (SM) in a cycle, of NVIDIA's papers on each architecture. A GeForce sums in
float32 at half of the rate of the same architecture's data center GPUs."""


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_gpu_is_the_one_that_is_compiled_for(gpu: Hardware):
    target = gpu_target(gpu.name)
    numbers = {name: float(value) for name, value in re.findall(r"(\w+): ([0-9.]+)", target)}
    assert (numbers["device_memory_size"], numbers["memory_bandwidth"]) == (gpu.memory_bytes, gpu.bytes_per_second)
    assert f'device_description_str: "{gpu.device_kind}"\n' in target
    # The clock that a vendor's peak is given for is the highest, or up to 8 % less: with all matrix units at work.
    hertz = gpu.flops_per_second / (numbers["core_count"] * FLOPS_PER_CYCLE[gpu.name])
    assert 0.92 < hertz / (numbers["clock_rate_ghz"] * 1e9) < 1.001


def test_every_gpu_has_a_target_and_every_target_is_known():
    assert {gpu.name for gpu in GPUS} == set(gpu_targets()) == set(FLOPS_PER_CYCLE)


def test_device_kinds_and_names_are_of_one_device():
    assert len({hardware.device_kind for hardware in HARDWARE.values()}) == len(HARDWARE)
    assert {name: hardware.name for name, hardware in HARDWARE.items()} == {name: name for name in HARDWARE}


def test_a_known_device_gives_what_the_table_says(caplog: pytest.LogCaptureFixture):
    """Runtimes report a few MiB more or less from build to build."""
    reported = 16_909_332_480
    assert V5E.memory_bytes <= reported
    assert real_memory_limit("TPU v5 lite", reported, 0.9) == V5E.memory_limit(0.9) == int(16_125 * 2**20 * 0.9)
    assert real_memory_limit("TPU v5 lite", None, 0.9) == V5E.memory_limit(0.9)
    assert not caplog.records


def test_a_device_that_gives_less_is_believed(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert real_memory_limit(H100.device_kind, 60 * 2**30, 0.9) == 54 * 2**30
    assert "smaller than `jaxllm check` says" in caplog.text
    assert real_memory_limit(H100.device_kind, 60 * 2**30, 0.5) == H100.memory_bytes // 2


def test_no_more_than_the_runtime_gives_out():
    assert H100.memory_limit(1.0) == H100.usable_bytes < H100.memory_bytes


def test_an_unknown_device_has_to_tell():
    assert real_memory_limit("A new one", 1000, 0.5) == 500
    with pytest.raises(VLLMValidationError, match="set kv_cache_memory_bytes"):
        real_memory_limit("A new one", None, 0.5)

"""The table of hardware says what devices have, and an engine uses its part of a device's memory."""

from __future__ import annotations

import logging

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.hardware import HARDWARE, find_topology, real_memory_limit
from pallas_kernels.targets import gpu_target

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
    ],
)
def test_topologies(topology: str, kind: str, num_devices: int):
    assert find_topology(topology) == (HARDWARE[kind], num_devices)


@pytest.mark.parametrize("name", ["v5e", "v5e:3x3", "v7x:2x2x1", "h100:3", "a100", ""])
def test_an_unknown_topology_is_refused_with_the_known_ones(name: str):
    with pytest.raises(VLLMValidationError, match=r"Known are v5e:1x1, .*tpu7x:2x2x1.*; h100, h100:2") as error:
        find_topology(name)
    assert (error.value.parameter, error.value.value) == ("topology", name)


def test_topologies_ascend():
    for hardware in HARDWARE.values():
        counts = list(hardware.topologies().values())
        assert counts == sorted(set(counts))


def test_the_h100_is_the_one_that_is_compiled_for():
    assert f"device_memory_size: {H100.memory_bytes} " in gpu_target("h100")
    assert f"memory_bandwidth: {H100.bytes_per_second:.0f} " in gpu_target("h100")


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

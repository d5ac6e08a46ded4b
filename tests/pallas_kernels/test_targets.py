"""Programs are compiled without a device for these GPU descriptions, which must be right."""

from __future__ import annotations

import re

import pytest

from pallas_kernels.targets import gpu_target, gpu_targets


def test_the_h100_is_what_nvidia_says():
    """The data sheet says: 132 SMs, 80 GB, 3.35 TB/s, 227 KB of shared memory for a block, compute capability 9.0."""
    assert gpu_targets() == ("h100",)
    text = gpu_target("h100")
    numbers = {name: float(value) for name, value in re.findall(r"(\w+): ([0-9.]+)", text)}
    assert (numbers["core_count"], numbers["threads_per_warp"]) == (132, 32)
    assert numbers["shared_memory_per_block_optin"] == 227 * 1024
    assert 3.3e12 < numbers["memory_bandwidth"] < 3.4e12
    assert 79 * 2**30 < numbers["device_memory_size"] < 80 * 2**30
    assert "cuda_compute_capability { major: 9 }" in text
    assert text.count("{") == text.count("}")


def test_an_unknown_target_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'b300'.*h100"):
        gpu_target("b300")

"""The GPU descriptions, for which programs are compiled without a device, are right."""

from __future__ import annotations

import re

import pytest

from pallas_kernels.targets import gpu_target, gpu_targets

GIB = 2**30
FIGURES = {
    "a100": ("major: 8", 108, 80, 2.04, 40),
    "h100": ("major: 9", 132, 80, 3.35, 50),
    "h200": ("major: 9", 132, 141, 4.8, 50),
    "b200": ("major: 10", 148, 180, 7.7, 126),
    "gb300": ("major: 10 minor: 3", 152, 279, 8, 129),
    "l4": ("major: 8 minor: 9", 58, 24, 0.3, 48),
    "l40s": ("major: 8 minor: 9", 142, 48, 0.864, 96),
    "rtx3090": ("major: 8 minor: 6", 82, 24, 0.936, 6),
    "rtx4090": ("major: 8 minor: 9", 128, 24, 1.008, 72),
    "rtx5090": ("major: 12 feature_extension: ACCELERATED_FEATURES", 170, 32, 1.792, 96),
}
"""Compute capability, multiprocessors, GB of memory, TB/s and MiB of second level cache, from the vendor's data sheets.
"""
OF_AN_SM = {
    "major: 8": (164, 163, 2048, 64),
    "major: 8 minor: 6": (100, 99, 1536, 128),
    "major: 8 minor: 9": (100, 99, 1536, 128),
    "major: 9": (228, 227, 2048, 128),
    "major: 10": (228, 227, 2048, 128),
    "major: 10 minor: 3": (228, 227, 2048, 128),
    "major: 12 feature_extension: ACCELERATED_FEATURES": (100, 99, 1536, 128),
}
"""KiB of shared memory, the part that a block can have, threads, and float32 units of a multiprocessor, from the CUDA
programming guide's table of compute capabilities."""


def fields(text: str) -> set[str]:
    """Return the names of the fields; comments have none."""
    return set(re.findall(r"(\w+):", re.sub(r"^#.*", "", text, flags=re.MULTILINE)))


def test_these_are_all():
    assert set(gpu_targets()) == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_target_is_what_nvidia_says(name: str):
    capability, cores, gigabytes, terabytes_per_second, cache = FIGURES[name]
    text = gpu_target(name)
    numbers = {name: float(value) for name, value in re.findall(r"(\w+): ([0-9.]+)", text)}
    assert f"cuda_compute_capability {{ {capability} }}" in text
    assert (numbers["core_count"], numbers["threads_per_warp"]) == (cores, 32)
    assert numbers["memory_bandwidth"] == pytest.approx(terabytes_per_second * 1e12, rel=0.01)
    # The vendor's GB are GiB for some and 10^9 bytes for others; error correction takes up to a sixteenth.
    assert 0.9 * gigabytes * GIB < numbers["device_memory_size"] <= gigabytes * GIB
    assert numbers["l2_cache_size"] == pytest.approx(cache * 2**20, rel=0.01)
    shared, of_a_block, threads, units = OF_AN_SM[capability]
    assert numbers["shared_memory_per_core"] == shared * 1024
    assert numbers["shared_memory_per_block_optin"] == of_a_block * 1024
    assert (numbers["threads_per_core_limit"], numbers["fpus_per_core"]) == (threads, units)
    # Without a driver's version, jax 0.11 puts neither matmuls nor loops nor the kernels here into CUDA graphs.
    assert 'driver_version: "13.0.0"' in text
    assert "runtime_version { major: 13 }" in text
    assert text.count("{") == text.count("}")
    assert fields(text) == fields(gpu_target("h100")) | fields(capability)


def test_an_unknown_target_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'b300'.*h100"):
        gpu_target("b300")

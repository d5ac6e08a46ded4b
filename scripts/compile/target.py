"""The hardware that programs are compiled for, which need not be there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.check.compilers import describe_devices
from jaxllm.resolve.hardware import Hardware, find_topology
from jaxllm.resolve.resolve_ops import detect_architecture
from pallas_kernels.targets import gpu_target

BANDWIDTH = {"v5e": 820e9, "v6e": 1640e9, "tpu7x": 3700e9}
"""HBM's nominal bytes per second of one device; a TPU7x chip is two devices."""


class Target(NamedTuple):
    """One device of a topology. scripts/compile.py has set the environment, which compilers read when loaded."""

    name: str
    hardware: Hardware
    sharding: NamedSharding
    dump: Path
    """The folder where libtpu leaves its listings of kernels."""

    @property
    def is_gpu(self) -> bool:
        return self.hardware.platform == "gpu"

    @property
    def architecture(self) -> str:
        """The name by which kernels are picked: a GPU's compute capability, a TPU's kind."""
        architecture = detect_architecture(list(self.sharding.device_set))
        assert architecture is not None
        return architecture

    @property
    def smem_limit(self) -> int:
        """The bytes of shared memory that a thread block of a GPU may have; 0 for a TPU."""
        figure = re.search(r"shared_memory_per_block_optin: (\d+)", gpu_target(self.name)) if self.is_gpu else None
        return int(figure[1]) if figure else 0

    @property
    def bandwidth(self) -> float:
        """HBM's nominal bytes per second, of a TPU."""
        return BANDWIDTH[self.name.partition(":")[0]]


def make_target(name: str, dump: Path) -> Target:
    """Return the first device of a topology."""
    hardware, count = find_topology(name)
    devices = describe_devices(hardware, name, 1 if hardware.platform == "gpu" else count)
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())
    return Target(name, hardware, sharding, dump)

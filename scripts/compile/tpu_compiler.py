"""Place programs on TPUs that are not there. Who imports this has set the environment: libtpu reads it when loaded."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.check.compilers import describe_devices
from jaxllm.execution.hardware import find_topology

BANDWIDTH = {"v5e": 820e9, "v6e": 1640e9, "tpu7x": 3700e9}
"""HBM's nominal bytes per second of one device; a TPU7x chip is two devices."""


def find_device(topology: str) -> NamedSharding:
    """Return the placement on a topology's first device."""
    hardware, num_devices = find_topology(topology)
    devices = describe_devices(hardware, topology, num_devices)
    return NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())

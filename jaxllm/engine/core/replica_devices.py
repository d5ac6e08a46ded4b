"""Restrict a replica to its part of the host's devices, before JAX opens them."""

from __future__ import annotations

import glob
import os
import sys

import jax

from jaxllm.config.environment import take_tpu_chips

_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""The files of GPUs, NVIDIA's and AMD's, and of TPUs."""


def take_share(replica: int, num_replicas: int, devices_each: int) -> None:
    """Let this process see the devices of one replica alone: the first `devices_each` are those of replica 0.

    GPUs are counted among those that CUDA_VISIBLE_DEVICES leaves, TPUs among a host's chips. Of a CPU each replica
    gets its part of the cores that the process may run on.
    """
    first = replica * devices_each
    devices = ",".join(str(each) for each in range(first, first + devices_each))
    jax.config.update("jax_cuda_visible_devices", devices)
    jax.config.update("jax_rocm_visible_devices", devices)
    take_tpu_chips(devices, devices_each)
    if not _has_accelerator() and sys.platform == "linux":
        os.sched_setaffinity(0, _share_of(sorted(os.sched_getaffinity(0)), replica, num_replicas))


def _share_of(cores: list[int], replica: int, num_replicas: int) -> list[int]:
    """Return a replica's part of some cores; replicas have one in common where there are more of them than cores."""
    replica %= num_replicas  # a later replica shares the cores of an older one
    if num_replicas >= len(cores):
        return [cores[replica % len(cores)]]
    return cores[replica * len(cores) // num_replicas : (replica + 1) * len(cores) // num_replicas]


def _has_accelerator() -> bool:
    """Return whether JAX will find a GPU or a TPU, which only it knows for sure."""
    platforms = jax.config.jax_platforms or ""
    return platforms != "cpu" and any(glob.glob(each) for each in _ACCELERATORS)

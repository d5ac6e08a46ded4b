"""The memory, bandwidth and arithmetic of accelerators, per device as JAX counts them.

An engine sizes its KV pool by this table if it has the device, so that every start gives the same number of blocks.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from jaxllm.execution.mesh import Device

logger = logging.getLogger(__name__)

MIB = 2**20
_LARGE_MEMORY = 70 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device. Bandwidth and arithmetic are the vendor's peaks, which no program reaches."""

    name: str
    platform: str
    """ "tpu" or "gpu"."""
    device_kind: str
    """The device's name in JAX."""
    memory_bytes: int
    """The memory that gpu_memory_utilization is a share of."""
    usable_bytes: int
    """The most bytes that the runtime gives out."""
    bytes_per_second: float
    """The bandwidth of the device's memory."""
    flops_per_second: float
    """The arithmetic of dense bfloat16 matmuls."""
    devices_per_host: int
    """The most devices that one host drives."""
    layouts: tuple[str, ...]
    """Topologies that can be rented; for GPUs, numbers of them."""
    devices_per_joined_host: int | None = None
    """The devices of each of several hosts, if fewer than those of a single host."""
    devices_per_chip: int = 1
    chip_config: str | None = None
    """The way in which libtpu makes devices of a chip's cores, if it is not libtpu's default."""

    def topologies(self) -> Mapping[str, int]:
        """Return the number of devices of each topology, by name, ascending."""
        if self.platform == "gpu":
            return {self.name if count == "1" else f"{self.name}:{count}": int(count) for count in self.layouts}
        return {
            f"{self.name}:{layout}": prod(map(int, layout.split("x"))) * self.devices_per_chip
            for layout in self.layouts
        }

    def num_hosts(self, num_devices: int) -> int:
        """Return the number of hosts that drive `num_devices` devices."""
        if num_devices <= self.devices_per_host:
            return 1
        return -(-num_devices // (self.devices_per_joined_host or self.devices_per_host))

    def memory_limit(self, utilization: float) -> int:
        """Return the bytes of one device that an engine may use."""
        return min(int(self.memory_bytes * utilization), self.usable_bytes)


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")


def _gpu(
    name: str,
    device_kind: str,
    memory_bytes: int,
    bytes_per_second: float,
    flops_per_second: float,
    devices_per_host: int = 8,
    *,
    is_joined: bool = False,
) -> Hardware:
    """Return a kind of GPU with its number per host; `is_joined` means that up to four hosts can be joined."""
    counts = [2**power for power in range(6) if 2**power <= devices_per_host * (4 if is_joined else 1)]
    return Hardware(
        name=name,
        platform="gpu",
        device_kind=device_kind,
        memory_bytes=memory_bytes,
        usable_bytes=int(memory_bytes * 0.95),  # the driver keeps about 1 %, and a runtime some for code
        bytes_per_second=bytes_per_second,
        flops_per_second=flops_per_second,
        devices_per_host=devices_per_host,
        layouts=tuple(map(str, counts)),
    )


# memory_bytes of TPUs: the largest array, in MiB, with which libtpu 0.0.48 and 0.0.51 still compile a program; their
# own messages say 30.75G, 15.75G, 95.73G, 31.24G and 94.74G (scripts/check.py capacity asks again). Runtimes report as
# bytes_limit a few MiB more: 16,909,332,480 on a v5e, 33,550,237,696 on a v6e (vllm-project/vllm#16211).
# Bandwidth and arithmetic: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x, where they are per chip; a
# chip of tpu7x is two devices, a chip of v4 or v5p one device of two cores.
# GPUs: memory and bandwidth are those of the descriptions in pallas_kernels/targets, which name their sources.
# Arithmetic is NVIDIA's figure for bfloat16 with sums in float32, without sparsity, or half of that with sparsity: of
# the data sheets of A100, H100, H200, L4, L40S, HGX B200 and GB300 NVL72, and of the white papers on the architectures
# GA102 (RTX 3090), Ada (RTX 4090) and RTX Blackwell (RTX 5090).
HARDWARE: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        Hardware(
            name="v4",
            platform="tpu",
            device_kind="TPU v4",
            memory_bytes=31_484 * MIB,
            usable_bytes=31_484 * MIB,
            bytes_per_second=1228e9,
            flops_per_second=275e12,
            devices_per_host=4,
            layouts=_CUBES,
            chip_config="megacore",
        ),
        Hardware(
            name="v5e",
            platform="tpu",
            device_kind="TPU v5 lite",
            memory_bytes=16_125 * MIB,
            usable_bytes=16_125 * MIB,
            bytes_per_second=819e9,
            flops_per_second=197e12,
            devices_per_host=8,
            devices_per_joined_host=4,
            layouts=_FLAT,
        ),
        Hardware(
            name="v5p",
            platform="tpu",
            device_kind="TPU v5",
            memory_bytes=98_024 * MIB,
            usable_bytes=98_024 * MIB,
            bytes_per_second=2765e9,
            flops_per_second=459e12,
            devices_per_host=4,
            layouts=("1x1x1", *_CUBES),
        ),
        Hardware(
            name="v6e",
            platform="tpu",
            device_kind="TPU v6 lite",
            memory_bytes=31_991 * MIB,
            usable_bytes=31_991 * MIB,
            bytes_per_second=1638e9,
            flops_per_second=918e12,
            devices_per_host=8,
            devices_per_joined_host=4,
            layouts=_FLAT,
        ),
        Hardware(
            name="tpu7x",
            platform="tpu",
            device_kind="TPU7x",
            memory_bytes=97_011 * MIB,
            usable_bytes=97_011 * MIB,
            bytes_per_second=7380e9 / 2,
            flops_per_second=2307e12 / 2,
            devices_per_host=8,
            layouts=("1x1x1", *_CUBES),
            devices_per_chip=2,
        ),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2039.04e9, 312e12, is_joined=True),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3352.32e9, 989.4e12, is_joined=True),
        _gpu("h200", "NVIDIA H200", 151_397_597_184, 4800e9, 989.4e12, is_joined=True),
        _gpu("b200", "NVIDIA B200", 191_514_411_008, 7672.32e9, 2250e12, is_joined=True),
        _gpu("gb300", "NVIDIA GB300", 297_021_079_552, 7928.064e9, 2500e12, devices_per_host=4),
        _gpu("l4", "NVIDIA L4", 23_583_784_960, 300.048e9, 121e12),
        _gpu("l40s", "NVIDIA L40S", 47_576_711_168, 864.096e9, 362.05e12),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 25_447_170_048, 936.096e9, 71e12),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 25_250_627_584, 1008.096e9, 165.2e12),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", 33_677_180_928, 1792.128e9, 209.5e12),
    )
}


def has_large_memory(device: Device) -> bool:
    """Return whether a GPU is one of those for large steps, as in vLLM: 70 GiB or more, and faster than an A100."""
    kind = device.device_kind
    known = next((each.memory_bytes for each in HARDWARE.values() if each.device_kind == kind), None)
    if known is None:
        reported = getattr(device, "memory_stats", lambda: None)() or {}
        known = reported.get("bytes_limit", 0)
    return known >= _LARGE_MEMORY and "A100" not in kind


def find_topology(name: str) -> tuple[Hardware, int]:
    """Return the hardware of a topology such as "v5e:2x2", and its number of devices; refuse an unknown one by name."""
    for hardware in HARDWARE.values():
        if name in hardware.topologies():
            return hardware, hardware.topologies()[name]
    known = "; ".join(", ".join(hardware.topologies()) for hardware in HARDWARE.values())
    message = f"topology={name!r} is not known.{_near_topology(name)} Known are {known}."
    raise VLLMValidationError(message, parameter="topology", value=name)


def _near_topology(name: str) -> str:
    """Return a hint for a name that is nearly a topology's: in capitals, or without the number of devices."""
    topologies = [each for hardware in HARDWARE.values() for each in hardware.topologies()]
    wanted = name.strip().lower()
    near = [each for each in topologies if each == wanted]
    near = near or [each for each in topologies if each.partition(":")[0] == wanted.partition(":")[0]]
    near = near or difflib.get_close_matches(wanted, topologies, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def real_memory_limit(device_kind: str, reported: int | None, utilization: float) -> int:
    """Return the bytes of a real device that an engine may use; `reported` is the limit that its runtime reports.

    The table decides if it has the kind, so that `jaxllm check` agrees. Raises VLLMValidationError if the kind is
    unknown and nothing is reported.
    """
    known = next((each for each in HARDWARE.values() if each.device_kind == device_kind), None)
    if known is None:
        if reported is None:
            raise VLLMValidationError(
                "This device does not tell how much memory it has: set kv_cache_memory_bytes.",
                parameter="kv_cache_memory_bytes",
                value=None,
            )
        return int(reported * utilization)
    planned = known.memory_limit(utilization)
    if reported is not None and reported < planned:
        logger.warning(
            "this %s gives %d bytes in all, fewer than the %d that gpu_memory_utilization=%s of it are: the KV cache "
            "is smaller than `jaxllm check` says.",
            known.device_kind,
            reported,
            planned,
            utilization,
        )
        return int(reported * utilization)
    return planned

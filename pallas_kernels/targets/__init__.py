"""Descriptions of GPUs, by which XLA compiles for them on machines without a GPU.

jax.experimental.topologies.get_topology_desc(
    platform="cuda", topology_name="h100", target_config=gpu_target("h100"), topology="1x1x1"
)
"""

from __future__ import annotations

from importlib.resources import files

SUFFIX = ".txtpb"


def hopper_refusal(architecture: str | None) -> str | None:
    """Return why kernels for Hopper do not run on a GPU with this compute capability, or None if they do.

    GPUs of other makers have no compute capability; `architecture` may then be another name, or None.
    """
    if architecture is not None and architecture.startswith("9."):
        return None
    is_nvidia = architecture is not None and architecture[0].isdigit()
    fact = f"has compute capability {architecture}" if is_nvidia else f"is not NVIDIA's ({architecture or 'ROCm'})"
    return f"the kernels are for NVIDIA's Hopper (compute capability 9.0), and this GPU {fact}"


def ampere_refusal(architecture: str | None) -> str | None:
    """Return why kernels for GPUs from Ampere on do not run on one with this compute capability, or None if they do."""
    major = "" if architecture is None else architecture.partition(".")[0]
    if major.isdigit() and int(major) >= 8:
        return None
    is_nvidia = architecture is not None and architecture[0].isdigit()
    fact = f"has compute capability {architecture}" if is_nvidia else f"is not NVIDIA's ({architecture or 'ROCm'})"
    return f"the kernels are for NVIDIA's GPUs from Ampere on (compute capability 8.0), and this GPU {fact}"


def gpu_targets() -> tuple[str, ...]:
    """Return the names of the GPUs that are described here."""
    names = (file.name for file in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)))


def gpu_target(name: str) -> str:
    """Return XLA's description of a GPU, a GpuTargetConfigProto in text form; ValueError for an unknown name."""
    if name not in gpu_targets():
        raise ValueError(f"there is no GPU target {name!r}, only {', '.join(gpu_targets())}")
    return files(__name__).joinpath(name + SUFFIX).read_text(encoding="utf-8")

"""XLA compiles for the GPUs described here on machines that have none.

jax.experimental.topologies.get_topology_desc(
    platform="cuda", topology_name="h100", target_config=gpu_target("h100"), topology="1x1x1"
)
"""

from __future__ import annotations

from importlib.resources import files

SUFFIX = ".txtpb"


def gpu_targets() -> tuple[str, ...]:
    """Return the names of the GPUs that are described here."""
    names = (file.name for file in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)))


def gpu_target(name: str) -> str:
    """Return XLA's description of a GPU, a GpuTargetConfigProto in text form; ValueError for an unknown name."""
    if name not in gpu_targets():
        raise ValueError(f"there is no GPU target {name!r}, only {', '.join(gpu_targets())}")
    return files(__name__).joinpath(name + SUFFIX).read_text(encoding="utf-8")

"""Find the packages with compilers for hardware that is not present, and the environment that they need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.hardware import Hardware

_INSTALL = "pip install 'jaxllm[check]'"
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, so a process that holds one does not matter
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
}
_GPU_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}  # a GPU that is present would be used for tuning
_MODULES = {"tpu": {"libtpu": "libtpu"}, "gpu": {"jax_plugins.xla_cuda13": "jax-cuda13-plugin"}}
"""The modules that each platform's compiler needs, with their packages."""
_PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "nvidia-cuda-nvcc")}


def require_compiler(hardware: Hardware) -> None:
    """Raise VLLMValidationError, with the command that installs it, if the compiler of a platform is missing."""
    missing = [package for module, package in _MODULES[hardware.platform].items() if not _is_there(module)]
    if hardware.platform == "gpu" and find_ptxas() is None:
        missing.append("nvidia-cuda-nvcc (ptxas)")
    if missing:
        raise VLLMValidationError(
            f"compiling for {hardware.name} needs {' and '.join(missing)}, which is not installed: {_INSTALL}",
            parameter="topology",
            value=hardware.name,
        )


def compiler_environment(hardware: Hardware, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that compiles for a platform and touches no device."""
    changed = environment | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if hardware.platform == "tpu":
        return changed | TPU_ENVIRONMENT
    ptxas = find_ptxas()
    path = environment.get("PATH", "")
    return changed | _GPU_ENVIRONMENT | {"PATH": f"{ptxas.parent}{os.pathsep}{path}" if ptxas else path}


def describe_devices(hardware: Hardware, topology: str, num_devices: int) -> Sequence[Any]:
    """Return JAX's devices of a topology, which need not exist. The environment must be `compiler_environment`'s."""
    from jax.experimental import topologies

    if hardware.platform == "tpu":
        options: dict[str, Any] = {"chip_config_name": hardware.chip_config} if hardware.chip_config else {}
        if num_devices == hardware.devices_per_chip:
            options["chips_per_host_bounds"] = [1, 1, 1]  # older libtpus assume that a host has four chips
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    from pallas_kernels.targets import gpu_target

    num_hosts = hardware.num_hosts(num_devices)
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=hardware.name,
        target_config=gpu_target(hardware.name),
        topology=f"1x{num_hosts}x{num_devices // num_hosts}",
    )
    return described.devices


def compiler_versions(hardware: Hardware) -> dict[str, str]:
    """Return the versions of the compilers."""
    packages = ("jax", *_PACKAGES[hardware.platform])
    return {package: importlib.metadata.version(package) for package in packages}


def find_ptxas() -> Path | None:
    """Return the assembler that comes with nvidia-cuda-nvcc, or else one that is on the PATH."""
    for folder in _nvidia_folders():
        for path in sorted(folder.glob("*/bin/ptxas"), reverse=True):
            return path
    path = shutil.which("ptxas")
    return Path(path) if path else None


def _nvidia_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia") if _is_there("nvidia") else None
    yield from map(Path, (spec.submodule_search_locations or ()) if spec else ())


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False

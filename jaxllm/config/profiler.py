"""`ProfilerConfig`: what `LLM.start_profile` records, and where. The fields are vLLM's; JAX's profiler records."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from jaxllm.config.groups import check_refused, refused
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_bool, check_int, check_str, shown

GROUP = "profiler_config"
_MAX_PATH = 4_096
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TORCH = "JAX's profiler records all that it knows of"
_SCHEDULE = "see delay_iterations and max_iterations"
_PROTON = "it belongs to Triton's profiler"


@dataclasses.dataclass(frozen=True)
class ProfilerConfig:
    """Settings of the profiler; without `profiler="torch"` there is none."""

    profiler: str | None = None
    """The name "torch" means JAX's profiler; its traces are for XProf, TensorBoard and Perfetto."""
    torch_profiler_dir: str = ""
    """The folder that traces go to; it is made."""
    torch_profiler_with_stack: bool = True
    """True records the Python functions that are called, too."""
    ignore_frontend: bool = False
    """It has no effect: front end and core are one process."""
    delay_iterations: int = 0
    """The number of steps before recording begins."""
    max_iterations: int = 0
    """The number of steps to record; 0 records until stop_profile is called."""
    torch_profiler_activities: None = refused(None, _TORCH)
    torch_profiler_with_flops: bool = refused(False, _TORCH)
    torch_profiler_use_gzip: bool = refused(True, "JAX chooses the form of its files")
    torch_profiler_dump_cuda_time_total: bool = refused(True, _TORCH)
    torch_profiler_record_shapes: bool = refused(False, "shapes are in the programs that a trace holds")
    torch_profiler_with_memory: bool = refused(False, "see jax.profiler.save_device_memory_profile")
    capture_torch_profiler: bool = refused(False, "there is no capture of CUDA graphs")
    detailed_trace_annotation: bool = refused(False, _TORCH)
    warmup_iterations: int = refused(0, _SCHEDULE)
    active_iterations: int = refused(5, _SCHEDULE)
    wait_iterations: int = refused(0, _SCHEDULE)
    proton_profiler_dir: str = refused("", _PROTON)
    proton_context: str = refused("shadow", _PROTON)
    proton_data: str = refused("tree", _PROTON)
    proton_backend: str | None = refused(None, _PROTON)
    proton_mode: str | None = refused(None, _PROTON)
    proton_hook: str | None = refused(None, _PROTON)
    proton_output_format: str | None = refused(None, _PROTON)
    proton_graph_attribution: bool = refused(False, _PROTON)

    def __post_init__(self) -> None:
        if self.profiler not in (None, "torch"):
            raise _error(
                f"profiler={shown(self.profiler)} is not supported; use 'torch', which is JAX's", self.profiler
            )
        check_refused(GROUP, self)
        for name in ("torch_profiler_with_stack", "ignore_frontend"):
            check_bool(f"{GROUP}.{name}", getattr(self, name), parameter=GROUP)
        for name in ("delay_iterations", "max_iterations"):
            check_int(f"{GROUP}.{name}", getattr(self, name), 0, INT32_MAX, parameter=GROUP)
        object.__setattr__(self, "torch_profiler_dir", self._check_folder())

    def _check_folder(self) -> str:
        """Return the folder's absolute path, or "" without a profiler."""
        folder = self.torch_profiler_dir
        if self.profiler is None:
            if folder != "":
                raise _error("torch_profiler_dir is only applicable when profiler is set to 'torch'", folder)
            return ""
        if folder == "":
            raise _error("torch_profiler_dir must be set when profiler is 'torch'", folder)
        check_str(f"{GROUP}.torch_profiler_dir", folder, _MAX_PATH, parameter=GROUP)
        if "://" in folder:
            raise _error(f"torch_profiler_dir={shown(folder)} must be a folder of this machine", folder)
        return os.path.abspath(os.path.expanduser(folder))


def check_profile_prefix(prefix: Any) -> str | None:
    """Return the prefix of a trace folder's name, or None. Raises VLLMValidationError."""
    if prefix is None or (isinstance(prefix, str) and _PREFIX.fullmatch(prefix)):
        return prefix
    message = (
        "profile_prefix must be 1-128 ASCII characters, start with a letter or number, and contain only letters, "
        f"numbers, '.', '_', or '-', got {shown(prefix)}."
    )
    raise VLLMValidationError(message, parameter="profile_prefix", value=prefix)


def _error(message: str, value: Any) -> VLLMValidationError:
    return VLLMValidationError(f"{GROUP}: {message}.", parameter=GROUP, value=value)

"""This is the only place of the engine that reads the process's environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from jaxllm.exceptions import VLLMValidationError

XLA_SETS: Mapping[str, str] = {"avx2": "AVX2", "plain": "SSE4_2"}
"""XLA's names of a processor's lesser instruction sets."""


def default_cache_dir() -> str:
    """Return where compiled programs and tokenizers are kept: JAXLLM_CACHE, or jaxllm in the user's cache folder.

    Raises VLLMValidationError where ~ or ~name in it stands for no folder.
    """
    user_cache = os.environ.get("JAXLLM_CACHE")
    folder = user_cache or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxllm"))
    try:
        return str(Path(folder).expanduser())
    except RuntimeError as error:
        message = f"there is no home folder for {folder!r}: set the environment variable JAXLLM_CACHE to a folder."
        raise VLLMValidationError(message, parameter="JAXLLM_CACHE", value=folder) from error


def tunes_malloc() -> bool:
    """Say whether the environment has settings of C's allocator, or another allocator that is loaded first."""
    return any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)


def plugin_names() -> list[str] | None:
    """Return the names of the plugins to load, from JAXLLM_PLUGINS ("one,other"; "" is none), or None for all."""
    names = os.environ.get("JAXLLM_PLUGINS")
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


def core_timeouts() -> tuple[float, float]:
    """Return how many seconds an engine core in a process of its own may take for a step or a call, compiling not
    counted, and may give no sign of life after its first: JAXLLM_STEP_TIMEOUT (300) and JAXLLM_SILENCE_TIMEOUT (30).

    Raises VLLMValidationError for values that are not positive numbers.
    """
    return _seconds("JAXLLM_STEP_TIMEOUT", 300.0), _seconds("JAXLLM_SILENCE_TIMEOUT", 30.0)


def traces_protocol() -> str:
    """Return how traces are sent, "grpc" or "http/protobuf", by OpenTelemetry's own variables; "grpc" by default.

    Raises VLLMValidationError for another one.
    """
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    value = os.environ.get(name) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if value not in ("grpc", "http/protobuf"):
        raise VLLMValidationError(
            f"the environment variable {name} is grpc or http/protobuf, not {value!r}.", parameter=name
        )
    return value


def api_key() -> str | None:
    """Return JAXLLM_API_KEY, a key that a server takes; None if it is unset or empty."""
    return os.environ.get("JAXLLM_API_KEY") or None


def client_api_key() -> str | None:
    """Return OPENAI_API_KEY, the key that clients send, as OpenAI's own does; None if it is unset or empty."""
    return os.environ.get("OPENAI_API_KEY") or None


def is_server_in_dev_mode() -> bool:
    """Say whether a server has routes that change the engine: JAXLLM_SERVER_DEV_MODE, or VLLM_SERVER_DEV_MODE, is 1."""
    return "1" in (os.environ.get("JAXLLM_SERVER_DEV_MODE"), os.environ.get("VLLM_SERVER_DEV_MODE"))


def allows_lora_updates() -> bool:
    """Say whether a server has routes that load adapters: JAXLLM_ALLOW_RUNTIME_LORA_UPDATING, or
    VLLM_ALLOW_RUNTIME_LORA_UPDATING, is 1 or true.
    """
    name = "ALLOW_RUNTIME_LORA_UPDATING"
    return not {"1", "true"}.isdisjoint(os.environ.get(f"{who}_{name}", "").lower() for who in ("JAXLLM", "VLLM"))


def uses_core_process() -> bool:
    """Say whether the engine core of an `LLM` gets a process of its own: JAXLLM_ENABLE_V1_MULTIPROCESSING is "1".

    Raises VLLMValidationError for a value other than "0" and "1".
    """
    name = "JAXLLM_ENABLE_V1_MULTIPROCESSING"
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise VLLMValidationError(f"the environment variable {name} is 0 or 1, not {value!r}.", parameter=name)
    return value == "1"


def _seconds(name: str, default: float) -> float:
    value = os.environ.get(name, default)
    with contextlib.suppress(ValueError):
        if (seconds := float(value)) > 0:
            return seconds
    message = f"the environment variable {name} is a number of seconds above 0, not {value!r}."
    raise VLLMValidationError(message, parameter=name, value=value)


def environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables whose names start with one of `prefixes`, sorted by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def limit_cpu() -> None:
    """Let XLA's own code keep to the instruction set that JAXLLM_CPU names, and its threads to a control group's quota.

    Call it before JAX starts: it settles XLA_FLAGS and NPROC, of which the user's own settings stand. Raises
    VLLMValidationError for a set that there is not.
    """
    from pallas_kernels.native import processor
    from pallas_kernels.native.cores import num_allowed, num_cores

    if wanted := os.environ.get(processor.SETTING):
        try:
            name = processor.current().name
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=processor.SETTING, value=wanted) from error
        flags = os.environ.get("XLA_FLAGS", "")
        if name in XLA_SETS and "xla_cpu_max_isa" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa={XLA_SETS[name]}".strip()
    if num_cores() < num_allowed():  # XLA counts those alone on which it may run
        os.environ.setdefault("NPROC", str(num_cores()))


_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
"""The forms of parts of a TPU host, by their number of chips."""


def take_tpu_chips(chips: str, count: int) -> None:
    """Let libtpu see some of the host's chips alone, if the user has not said which.

    Call it before JAX starts. Parts of a host have 1, 2 or 4 chips; for another number libtpu sees all.
    """
    if count in _TPU_BOUNDS and not environment(("TPU_VISIBLE_",)):
        os.environ["TPU_VISIBLE_CHIPS"] = chips
        os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _TPU_BOUNDS[count]
        os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"


def compile_alone() -> None:
    """Let XLA not share the tuning of a GPU's programs out among hosts, which would wait for each other to compile.

    Call it before JAX starts. The user's own setting stands.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_shard_autotuning" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()


def reserve_gpu_memory(utilization: float) -> None:
    """Let JAX's allocator have what the engine is to use of a GPU; by itself it takes 75 % of what is free.

    The user's own fraction stands, and so does what a JAX that already runs was started with.
    """
    if not environment(("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")):
        # Of free memory, which is a little less than all, of which the engine takes its part; and some is lost in gaps.
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{min(0.97, utilization + 0.05):.2f}"

"""Read the process's environment; no other module of the engine does."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from jaxllm.exceptions import VLLMValidationError

_XLA_SETS: Mapping[str, str] = {"avx2": "AVX2", "plain": "SSE4_2"}
"""XLA's names of a processor's lesser instruction sets."""


def default_cache_dir() -> str:
    """Return the folder of compiled programs and tokenizers: JAXLLM_CACHE, or jaxllm in the user's cache folder.

    Raises VLLMValidationError if ~ or ~name in it stands for no folder.
    """
    user_cache = os.environ.get("JAXLLM_CACHE")
    folder = user_cache or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxllm"))
    try:
        return str(Path(folder).expanduser())
    except RuntimeError as error:
        message = f"there is no home folder for {folder!r}: set the environment variable JAXLLM_CACHE to a folder."
        raise VLLMValidationError(message, parameter="JAXLLM_CACHE", value=folder) from error


def tunes_malloc() -> bool:
    """Return whether the environment configures C's allocator, or preloads another one."""
    return any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)


def plugin_names() -> list[str] | None:
    """Return the names of the plugins to load, from JAXLLM_PLUGINS ("one,other"; "" is none), or None for all."""
    names = os.environ.get("JAXLLM_PLUGINS")
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


def core_timeouts() -> tuple[float, float]:
    """Return two timeouts, in seconds, of a core in its own process: of one step or call, and of the core's silence.

    They are JAXLLM_STEP_TIMEOUT (300), without the time of compiling, and JAXLLM_SILENCE_TIMEOUT (30), which counts
    from the core's first sign of life.

    Raises VLLMValidationError for values that are not positive numbers.
    """
    return _seconds("JAXLLM_STEP_TIMEOUT", 300.0), _seconds("JAXLLM_SILENCE_TIMEOUT", 30.0)


def traces_protocol() -> str:
    """Return the protocol of traces, "grpc" or "http/protobuf", by OpenTelemetry's variables; "grpc" by default.

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
    """Return OPENAI_API_KEY, the key that clients send, as OpenAI's client does; None if it is unset or empty."""
    return os.environ.get("OPENAI_API_KEY") or None


def gives_gpu_memory_back() -> bool:
    """Return whether JAX gives freed memory of a GPU back to other processes: XLA_PYTHON_CLIENT_ALLOCATOR is
    "platform".
    """
    return os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"


def is_server_in_dev_mode() -> bool:
    """Return whether a server has routes that change the engine: JAXLLM_ or VLLM_SERVER_DEV_MODE is 1."""
    return "1" in (os.environ.get("JAXLLM_SERVER_DEV_MODE"), os.environ.get("VLLM_SERVER_DEV_MODE"))


def allows_lora_updates() -> bool:
    """Return whether a server has routes that load adapters.

    JAXLLM_ALLOW_RUNTIME_LORA_UPDATING, or VLLM_ALLOW_RUNTIME_LORA_UPDATING, is then 1 or true.
    """
    name = "ALLOW_RUNTIME_LORA_UPDATING"
    return not {"1", "true"}.isdisjoint(os.environ.get(f"{who}_{name}", "").lower() for who in ("JAXLLM", "VLLM"))


def audio_limits() -> tuple[int, float | None, int]:
    """Return the limits of a sound that a server transcribes: the bytes of its file, its seconds, which may be
    unbounded, and the bytes of its samples.

    They are MAX_AUDIO_CLIP_FILESIZE_MB (25), MAX_AUDIO_DECODE_DURATION_S (no limit) and MAX_AUDIO_DECODE_BYTES
    (268435456), each after JAXLLM_ or VLLM_. Raises VLLMValidationError for values that are not positive numbers.
    """
    size = _limit("MAX_AUDIO_CLIP_FILESIZE_MB") or 25
    num_bytes = _limit("MAX_AUDIO_DECODE_BYTES") or 2**28
    return int(size * 2**20), _limit("MAX_AUDIO_DECODE_DURATION_S"), int(num_bytes)


def uses_core_process() -> bool:
    """Return whether the engine core of an `LLM` gets a process of its own: JAXLLM_ENABLE_V1_MULTIPROCESSING is "1".

    Raises VLLMValidationError for a value other than "0" and "1".
    """
    name = "JAXLLM_ENABLE_V1_MULTIPROCESSING"
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise VLLMValidationError(f"the environment variable {name} is 0 or 1, not {value!r}.", parameter=name)
    return value == "1"


def _limit(name: str) -> float | None:
    """Return the number of an environment variable of ours or else of vLLM's; None if neither is set."""
    known = next((each for each in (f"JAXLLM_{name}", f"VLLM_{name}") if each in os.environ), None)
    return None if known is None else _number(known, 0, "a number", 2.0**32)


def _seconds(name: str, default: float) -> float:
    return _number(name, default, "a number of seconds")


def _number(name: str, default: float, kind: str, most: float = math.inf) -> float:
    value = os.environ.get(name, default)
    with contextlib.suppress(ValueError):
        if 0 < (number := float(value)) <= most:
            return number
    bound = "" if most == math.inf else f" and up to {most:.0f}"
    message = f"the environment variable {name} is {kind} above 0{bound}, not {value!r}."
    raise VLLMValidationError(message, parameter=name, value=value)


def environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables whose names start with one of `prefixes`, sorted by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def limit_cpu() -> None:
    """Limit XLA's code to the instruction set that JAXLLM_CPU names, and its threads to the control group's quota.

    Call it before JAX starts: it sets XLA_FLAGS and NPROC, except where the user did. Raises VLLMValidationError for an
    unknown instruction set.
    """
    from pallas_kernels.native import processor
    from pallas_kernels.native.cores import num_allowed, num_cores

    if wanted := os.environ.get(processor.SETTING):
        try:
            name = processor.current().name
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=processor.SETTING, value=wanted) from error
        flags = os.environ.get("XLA_FLAGS", "")
        if name in _XLA_SETS and "xla_cpu_max_isa" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa={_XLA_SETS[name]}".strip()
    if num_cores() < num_allowed():  # XLA only counts the processors that it may run on
        os.environ.setdefault("NPROC", str(num_cores()))


_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
"""The chip bounds of parts of a TPU host, by their number of chips."""


def take_tpu_chips(chips: str, count: int) -> None:
    """Let libtpu see only some of the host's chips, unless the user has chosen them.

    Call it before JAX starts. Parts of a host have 1, 2 or 4 chips; for other numbers libtpu sees all chips.
    """
    if count in _TPU_BOUNDS and not environment(("TPU_VISIBLE_",)):
        os.environ["TPU_VISIBLE_CHIPS"] = chips
        os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _TPU_BOUNDS[count]
        os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"


def compile_alone() -> None:
    """Stop XLA from sharing the tuning of GPU programs among hosts, which would wait for each other to compile.

    Call it before JAX starts. The user's own setting takes precedence.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_shard_autotuning" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()


def sets_xla_flag(name: str) -> bool:
    """Return whether the user sets one of XLA's flags."""
    return f"--{name}=" in os.environ.get("XLA_FLAGS", "")


def reserve_gpu_memory(utilization: float) -> None:
    """Give JAX's allocator the share of a GPU that the engine may use; by default it takes 75 % of the free memory.

    The user's own fraction takes precedence, and so does the fraction that a running JAX was started with.
    """
    if not environment(("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")):
        # JAX takes a share of the free memory, which is a little less than the total that the engine counts by. Gaps
        # between arrays lose some more.
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{min(0.97, utilization + 0.05):.2f}"

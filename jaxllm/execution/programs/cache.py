"""Keep compiled programs on disk, and find them by their code and configuration, without a trace.

JAX's own compile cache finds a program by its traced form, and tracing takes longer than the rest of loading it. A
program is machine code, and a stranger's is never safe to load: folders and files that another user owns, or may write
to, are not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import time
import zlib
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import pallas_kernels
from jaxllm import models, version
from jaxllm.execution.options import counts
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import ProgramKey, describe
from jaxllm.utils.files import make_own, read_own, write_whole
from jaxllm.utils.log import log_phase

logger = logging.getLogger(__name__)

MAX_BYTES = {"cpu": 1 << 30, "gpu": 8 << 30, "tpu": 8 << 30}
"""The most bytes of all programs on disk, by platform; those used longest ago are removed first."""
_CODE_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe")
"""A CPU's machine code starts with these bytes, on Linux and on macOS."""
_COMPILERS = (
    "jax-cuda12-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda13-plugin",
    "libtpu",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
)
"""The packages that compile for an accelerator, as far as they are installed."""
_DEVICE_FACTS = ("id", "platform", "device_kind", "compute_capability", "core_count", "coords", "core_on_chip")
"""JAX's attributes of a device that a program may depend on, as far as its platform has them."""
_LIBRARIES = ("jax", "jaxlib", "flax", "llvmlite", "numpy")
_CODE = (version.__file__, models.__file__, pallas_kernels.__file__)
"""jaxllm's own packages that a program may depend on."""


@cache
def _started() -> float:
    """Return when this process began its first engine. Files written or used since then stay: engines need their
    programs in one order, so each would miss all of them.
    """
    return time.time()


class Folders(NamedTuple):
    """The folders of compiled code; None where none is kept."""

    programs: Path | None
    kernels: Path | None


def use_cache(cache_dir: str, *, keeps_programs: bool, platform: str = "cpu") -> Folders:
    """Keep compiled programs in a folder per CPU model: code for another CPU must be a clean miss.

    Returns the folders for a ProgramCache. It keeps no programs if `keeps_programs` is False, where JAX's own cache
    takes its place, and nothing if the user disabled the cache, or the folder is not this user's own. If the user set a
    folder for JAX's cache, both caches use it. On an accelerator JAX's cache is used as well: for the small programs
    that prepare weights, and after a change of the code that leaves a program as it was. It stores the others a second
    time, so in our folder it may take as many bytes as the programs, if the user set no limit.
    """
    _started()
    # Loading takes 0.05 s where the smallest program takes 1 s to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    user_folder = jax.config.jax_compilation_cache_dir
    folder = Path(user_folder or Path(cache_dir, "xla", cpu_digest()))
    if not jax.config.jax_enable_compilation_cache:
        return Folders(None, None)
    kernels, programs = _own(folder / "kernels"), _own(folder / "programs") if keeps_programs else None
    if not (keeps_programs and platform == "cpu") and user_folder is None and _own(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # With a limit JAX locks a file in the folder, and could not even read one that only root may write.
        if jax.config.jax_compilation_cache_max_size == -1 and os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_max_size", MAX_BYTES[platform])
        compilation_cache.reset_cache()  # a program compiled before has fixed that there is no cache
    return Folders(programs, kernels)


def _own(folder: Path) -> Path | None:
    """Make a folder for code and return it; return None, with a warning, if it is not this user's own."""
    try:
        make_own(folder)
    except OSError as error:
        logger.warning("compiled code is neither kept nor loaded: %s; set JAXLLM_CACHE to a folder of your own", error)
        return None
    return folder


class ProgramCache:
    """The programs of one compiler and pool size in a folder. A file that cannot be used counts as missing."""

    def __init__(
        self, compiler: StepCompiler, num_blocks: int, folders: Folders, environment: Mapping[str, str]
    ) -> None:
        """Find programs by `environment` too, which has the variables that XLA reads."""
        self._compiler, self._num_blocks = compiler, num_blocks
        self._folder, self._kernels, self._environment = folders.programs, folders.kernels, environment

    def load(self, key: ProgramKey) -> jax.stages.Compiled | None:
        """Return a program from disk, or None if there is no usable one."""
        started = time.perf_counter()
        if self._folder is None:
            return None
        path = self._path(key)
        payload = _read(path)
        if payload is None:
            return None
        devices = self._compiler.mesh.devices.flat
        try:
            self._compiler.prepare(self._kernels)
            program = serialize_executable.deserialize_and_load(
                payload,
                *self._compiler.trees(key, self._num_blocks),
                backend=devices[0].client,
                execution_devices=list(devices),
            )
        except Exception as error:  # noqa: BLE001 (XLA raises every kind here)
            return _give_up(path, error)
        with contextlib.suppress(OSError):  # it may be root's
            os.utime(path)
        log_phase(logger, describe(key), time.perf_counter() - started)
        return program

    def used_bytes(self) -> int:
        """Return `StepCompiler.used_bytes` of the compiler, which takes a compilation, or the number kept on disk."""
        if self._folder is None:
            return self._compiler.used_bytes()
        path = self._path("used bytes")
        kept = _read(path) or b""
        if kept.isdigit():
            with contextlib.suppress(OSError):
                os.utime(path)
            return int(kept)
        used = self._compiler.used_bytes()
        self._write(path, str(used).encode())
        return used

    def is_kept(self, key: ProgramKey) -> bool:
        """Return whether a program has a file."""
        return self._folder is not None and os.path.exists(self._path(key))

    def compile(self, key: ProgramKey) -> jax.stages.Compiled:
        """Compile a program and keep it."""
        self._compiler.prepare(self._kernels)
        program = self._compiler.compile(key, self._num_blocks)
        if self._folder is not None:
            self._save(program, self._path(key))
        return program

    def _path(self, key: ProgramKey | str) -> Path:
        assert self._folder is not None
        return self._folder / hashlib.sha256(f"{self._facts}\n{key}".encode()).hexdigest()

    @cached_property
    def _facts(self) -> str:
        """Return everything that a program depends on besides its key, as text."""
        compiler = self._compiler
        settings = {name: value for name, value in jax.config.values.items() if counts(name)}
        devices = list(compiler.mesh.devices.flat)
        return "\n".join(
            str(each)
            for each in (
                code_digest(),
                _host_facts() if self._is_for_cpu else (devices[0].client.platform_version, *map(_version, _COMPILERS)),
                sorted(self._environment.items()),
                sorted(settings.items()),
                [[getattr(device, name, None) for name in _DEVICE_FACTS] for device in devices],
                jax.process_index(),
                compiler.config,
                compiler.options,
                compiler.model.facts,
                compiler.shapes.buckets,
                self._num_blocks,
            )
        )

    @property
    def _is_for_cpu(self) -> bool:
        return self._compiler.config.platform == "cpu"

    def _save(self, program: jax.stages.Compiled, path: Path) -> None:
        try:
            payload, _, _ = serialize_executable.serialize(program)
        except Exception as error:  # noqa: BLE001 (JAX and XLA raise every kind here, and the program is there)
            logger.warning("a compiled program cannot be kept: %s", error)
            return
        # XLA:CPU does not serialize a program that was itself loaded, as from JAX's cache.
        if not self._is_for_cpu or any(magic in payload for magic in _CODE_MAGIC):
            self._write(path, payload)

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file for `_read`, if that is possible."""
        try:
            make_own(path.parent)
            _make_room(path.parent, MAX_BYTES[self._compiler.config.platform])
            write_whole(path, zlib.compress(content, 1))
        except OSError as error:
            logger.warning("a compiled program cannot be kept: %s", error)


def _read(path: Path) -> bytes | None:
    """Return the content of a file that only this user can have written; None if there is none, or it is damaged."""
    try:
        return zlib.decompress(read_own(path))
    except FileNotFoundError:
        return None
    except (OSError, zlib.error) as error:
        return _give_up(path, error)


def _give_up(path: Path, error: Exception) -> None:
    logger.warning("a compiled program cannot be loaded, and is compiled again: %s", error)
    with contextlib.suppress(OSError):
        path.unlink()


def _make_room(folder: Path, max_bytes: int) -> None:
    """Remove the files used longest ago until there is room for another; other processes may do the same."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has removed or renamed it meanwhile
                status = entry.stat()
                files.append((status.st_mtime, status.st_size, entry.path))
    excess = sum(size for _, size, _ in files) - max_bytes
    for used, size, path in sorted(files):
        if excess <= 0 or used >= _started():
            return
        Path(path).unlink(missing_ok=True)
        excess -= size


@cache
def code_digest() -> str:
    """Return a digest of all code that a program depends on; code that is imported does not change with its file."""
    versions = [metadata.version(name) for name in _LIBRARIES]
    return " ".join([*versions, source_digest(Path(package).parent for package in _CODE)])


def source_digest(packages: Iterable[Path]) -> str:
    """Return a digest of the packages' Python files."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _host_facts() -> tuple[str, int | None, int | None]:
    """Return what a CPU's programs depend on: its model, and the number of threads, which XLA divides its loops by."""
    return cpu_digest(), os.cpu_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def cpu_digest() -> str:
    """Return a short name for this CPU model and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        facts = [platform.machine(), platform.processor()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]

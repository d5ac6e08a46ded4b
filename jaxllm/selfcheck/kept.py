"""Keep reports on disk, by everything that a verdict depends on."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.config.arguments import EngineArguments
from jaxllm.config.environment import default_cache_dir, environment
from jaxllm.execution.programs.cache import code_digest, source_digest
from jaxllm.selfcheck.device import Accelerators
from jaxllm.selfcheck.process import versions
from jaxllm.selfcheck.report import Report
from jaxllm.utils.files import make_own, read_own, write_whole

logger = logging.getLogger(__name__)

_VARIABLES = ("XLA_", "LIBTPU_", "JAX_PLATFORMS")
"""The prefixes of environment variables that kernels may depend on."""
_OTHER_GROUPS = (
    "SchedulerConfig",
    "StructuredOutputsConfig",
    "ObservabilityConfig",
    "ProfilerConfig",
    "CompilationConfig",
    "AsyncEngineArgs",
)
"""Groups of engine arguments that change no kernel."""
_ELSEWHERE = (
    *("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"),
    *("data_parallel_size", "data_parallel_backend", "selfcheck", "seed", "served_model_name", "logits_processors"),
)
"""Other arguments that change no kernel."""
_MODEL_FILES = ("config.json", "quantize_config.json", "quantization_config.json")


def portable_args(args: EngineArguments) -> dict[str, Any]:
    """Return the arguments that kernels depend on, and the hub's token, for another process.

    Raises VLLMValidationError for a value without a name, such as a mesh.
    """
    fields = {field.name: field for field in dataclasses.fields(EngineArguments)}
    kept: dict[str, Any] = {
        name: getattr(args, name)
        for name, field in fields.items()
        if name not in _ELSEWHERE and field.metadata["group"] not in _OTHER_GROUPS
    }
    return EngineArguments(**kept).portable()


def report_path(engine_args: dict[str, Any], accelerators: Accelerators) -> Path:
    """Return the file of a report on an engine with `portable_args` on these devices."""
    # Which of several kinds this engine has, these say.
    variables = (*_VARIABLES, "CUDA_") if len(accelerators.kinds) > 1 else _VARIABLES
    draft = EngineArguments(**engine_args).speculation()
    models = [engine_args["model"], *([draft.model] if draft is not None and draft.model else [])]
    facts = (
        code_digest(),
        source_digest([Path(__file__).parent]),
        versions(),
        accelerators,
        sorted(environment(variables).items()),
        sorted((name, repr(value)) for name, value in engine_args.items() if name != "hf_token"),
        [_model_facts(Path(model)) for model in models],
    )
    name = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Path(default_cache_dir(), "selfcheck", f"{name}.json")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process, such as another replica, makes the same report."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            make_own(path.parent)
            file = stack.enter_context(path.with_suffix(".lock").open("wb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("another process checks the same kernels: this one waits for it")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_report(path: Path) -> Report | None:
    """Return a kept report, or None if there is none that this user or root has written."""
    try:
        return msgspec.json.decode(read_own(path), type=Report)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("a kept self check is not used: %s", error)
        return None


def keep_report(path: Path, report: Report) -> None:
    """Keep a report; a warning says if that is not possible."""
    try:
        make_own(path.parent)
        write_whole(path, msgspec.json.format(msgspec.json.encode(report), indent=1))
    except OSError as error:
        logger.warning("a self check is not kept: %s; set JAXLLM_CACHE to a folder of your own", error)


def _model_facts(model: Path) -> list[tuple[str, int, int]]:
    """Return the sizes and times of a local model's files that its shapes depend on."""
    facts = []
    with contextlib.suppress(OSError):
        for path in [model / name for name in _MODEL_FILES] if model.is_dir() else [model]:
            if path.is_file():
                facts.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
    return facts

"""Ask another process to compile, in its own environment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxllm.check.compilers import compiler_environment, require_compiler
from jaxllm.check.report import Report
from jaxllm.config.environment import environment
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.hardware import find_topology
from jaxllm.utils import child_process

if TYPE_CHECKING:
    from jaxllm.resolve.engine_args import EngineArgs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The engine to examine, and the topology."""

    topology: str
    engine_args: dict[str, Any]


def ask(args: EngineArgs, topology: str) -> Report:
    """Return the report on an engine. Raises VLLMValidationError for misuse, ChildError if there is no answer."""
    hardware, num_devices = find_topology(topology)
    if args.tensor_parallel_size > num_devices:
        raise VLLMValidationError(
            f"tensor_parallel_size={args.tensor_parallel_size} is more than the {num_devices} devices of {topology}.",
            parameter="tensor_parallel_size",
            value=args.tensor_parallel_size,
        )
    require_compiler(hardware)
    request = Request(topology=topology, engine_args=args.portable())
    return child_process.ask("jaxllm.check", request, Report, compiler_environment(hardware, environment(("",))))

"""Asking another process to compile: in its own environment, and ended when this one is interrupted."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.config import environment
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.hardware import find_topology

from .compilers import compiler_environment, require_compiler
from .report import Report

if TYPE_CHECKING:
    from jaxllm.config import EngineArgs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to look at."""

    topology: str
    engine_args: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A report, or what the user did wrong."""

    report: Report | None = None
    error: str | None = None
    parameter: str | None = None


class CompilerError(RuntimeError):
    """The process that compiles ended without an answer; it has said why on standard error."""


def ask(args: EngineArgs, topology: str) -> Report:
    """Return the report on an engine. Raises VLLMValidationError for misuse, CompilerError where there is no answer."""
    hardware, num_devices = find_topology(topology)
    if args.tensor_parallel_size > num_devices:
        raise VLLMValidationError(
            f"tensor_parallel_size={args.tensor_parallel_size} is more than the {num_devices} devices of {topology}.",
            parameter="tensor_parallel_size",
            value=args.tensor_parallel_size,
        )
    require_compiler(hardware)
    request = Request(topology=topology, engine_args=given(args))
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxllm.check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=compiler_environment(hardware, environment(("",))),
    ) as process:
        try:
            output, _ = process.communicate(msgspec.json.encode(request))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or not output.strip():
        raise CompilerError(f"compiling for {topology} failed (status {process.returncode}); the reason is above.")
    answer = msgspec.json.decode(output.splitlines()[-1], type=Answer)
    if answer.report is None:
        raise VLLMValidationError(answer.error or "", parameter=answer.parameter)
    return answer.report


def given(args: EngineArgs) -> dict[str, Any]:
    """Return the arguments that are not left at their defaults, in JSON's types."""
    given = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if value != default:
            given[field.name] = msgspec.to_builtins(value)
    return given

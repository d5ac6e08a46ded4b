"""`jaxllm bench startup` shows how the time from the start of a process to its first token is spent."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxllm.cli.flags.engine_flags import add_engine_flags, read_engine_args
from jaxllm.config.environment import environment
from jaxllm.utils import child_process
from jaxllm.utils.streams import say, show


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An engine to start in a process that started at `started` (time.time())."""

    engine_args: dict[str, Any]
    started: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a start-up and its duration."""

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """One start of one process, in seconds."""

    versions: dict[str, str]
    device: str
    parts: list[Part]
    """Consecutive parts up to the first token; the last one includes the wait for its program."""
    first_token: float
    """Time from the process' start to the first token."""
    programs: list[Part]
    """All programs of the engine, in the order of compilation; some compile beside the parts above, some after them."""
    all_programs: float
    """Time from the process' start to the last program."""
    num_compilations: int
    """The number of compiled programs, with JAX's own small ones; the others were in the compile cache."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "startup",
        help="measure the engine's start-up time",
        description="Start the engine twice, each time in a new process: with an empty compile cache, and with the one "
        "that the first process left. Prints the time of each part, up to the first token and to the last program. "
        "Files of the model are in the system's cache the second time.",
        epilog="Exit status: 0 measured, 2 misuse, 3 the engine did not start, 4 results could not be written.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_engine_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the figures and return the exit status."""
    engine_args = read_engine_args(args).portable()
    try:
        with tempfile.TemporaryDirectory(prefix="jaxllm-startup-") as cache:
            cold = _start(engine_args, cache)
            warm = _start(engine_args, cache)
    except child_process.ChildError as error:
        say(f"jaxllm: error: the engine did not start: {error}.")
        return 3
    if args.json:
        show(msgspec.json.format(msgspec.json.encode({"cold": cold, "warm": warm}), indent=1).decode())
    else:
        show("\n".join(_table(args.model, cold, warm)))
    return 0


def _start(engine_args: dict[str, Any], compile_cache: str) -> Startup:
    """Start an engine in a new process; its log goes to standard error."""
    request = Request(engine_args=engine_args, started=time.time())
    env = environment(("",)) | {"JAX_COMPILATION_CACHE_DIR": compile_cache}
    return child_process.ask("jaxllm.cli.bench.startup_probe", request, Startup, env)


def _table(model: str, cold: Startup, warm: Startup) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in cold.versions.items())
    yield f"{model} on {cold.device}; {versions}"
    yield f"{'seconds':40s} {'empty cache':>12s} {'filled cache':>12s}"
    for one, other in zip(cold.parts, warm.parts, strict=True):
        yield f"{one.name:40s} {one.seconds:12.2f} {other.seconds:12.2f}"
    yield f"{'= first token':40s} {cold.first_token:12.2f} {warm.first_token:12.2f}"
    later = {part.name: f"{part.seconds:.2f}" for part in warm.programs}
    for part in cold.programs:
        yield f"program: {part.name:31s} {part.seconds:12.2f} {later.get(part.name, 'not loaded'):>12s}"
    yield f"{'= all programs there':40s} {cold.all_programs:12.2f} {warm.all_programs:12.2f}"
    yield f"{'compilations':40s} {cold.num_compilations:12d} {warm.num_compilations:12d}"

#!/usr/bin/env python3
"""Run slow checks only when something that they depend on has changed since they passed.

    scripts/guarded.py status                  print one line per check: its name, whether it has to run, and why;
                                               those come first that have not passed for the longest time
    scripts/guarded.py changed CHECK           exit with 0 if CHECK has to run, with 1 if it has passed on these sources
    scripts/guarded.py tests CHECK             print the files that have tests of CHECK
    scripts/guarded.py files CHECK             print every file that CHECK depends on, with a file that needs it
    scripts/guarded.py run CHECK -- COMMAND    run COMMAND; if it passes and no source changed meanwhile, record that

A check depends on its tests, on all that they import or start (scripts/source_graph.py), on the locked versions of the
packages that these import, on Python's version and, if its subject is the code for a kind of processor, on the
processor's kind. The others need not run again on another processor: what always runs starts engines on every machine,
and a nightly run runs all checks. tests/guarded.json has the digest of each check's sources when it last passed, by
kind of machine, when that was, and how many tests were skipped then: commit it with the change. `scripts/test.sh` runs
the checks that have to run, and where time does not suffice for all, those that have not passed for the longest time;
`scripts/test.sh --all` runs every check.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from source_graph import SourceGraph

ROOT = Path(__file__).resolve().parents[1]
RECORD = "tests/guarded.json"
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
PYTHON = "Python " + ".".join(map(str, sys.version_info[:2]))


@dataclass(frozen=True)
class Check:
    """A slow check: what it depends on besides the tests that have its mark and all that they need."""

    programs: tuple[str, ...] = ()
    """Programs that it runs instead of marked tests."""
    pages: tuple[str, ...] = ()
    """Other files, outside the folders of the source graph, that its tests or its command read."""
    leaves_out: Mapping[str, str] = field(default_factory=dict)
    """Patterns of paths (`*` matches "/" too) that need not be watched, with the reason."""
    each_processor: str | None = None
    """The reason why it has to pass on each kind of processor, if it does."""


PRODUCT = ("jaxllm/*", "models/*", "pallas_kernels/*")
CPU_KERNELS = ("pallas_kernels/native/*", "pallas_kernels/*/cpu/*")
GPU_KERNELS = ("pallas_kernels/*/gpu/*", "pallas_kernels/*/gpu*.py")
TPU_KERNELS = ("pallas_kernels/*/tpu/*", "pallas_kernels/*/tpu.py")
NUMERICS = ("jaxllm/loading/*", "models/*", "pallas_kernels/*")
"""Weights, models and kernels."""


def unwatched(reason: str, *patterns: str) -> dict[str, str]:
    """Return patterns of paths that a check leaves out for one reason."""
    return dict.fromkeys(patterns, reason)


CHECKS = {
    # Kernels in their interpreters, and in plain XLA.
    "kernels": Check(
        leaves_out=unwatched("workloads take only shapes from them", "jaxllm/*", "models/*")
        | unwatched("`cpu_kernels` runs them", *CPU_KERNELS),
    ),
    # The same in an engine, beside the kernels of CPUs.
    "engine_kernels": Check(each_processor="an engine runs the kernels that are made for its processor"),
    "cpu_kernels": Check(
        leaves_out=unwatched("tests take only activations from models", "models/families/*")
        | unwatched("`kernels` runs them", *GPU_KERNELS, *TPU_KERNELS),
        each_processor="they are made for the processor",
    ),
    # Models alone, against HF's outputs and attention over held keys and values.
    "models": Check(),
    # Checkpoints as they are loaded: how much memory that takes, and what the formats' own tools wrote.
    "loading": Check(),
    # Tokens drawn from logits, and log-probabilities.
    "sampling": Check(
        leaves_out=unwatched("tests make the logits: no model is loaded or runs", *NUMERICS),
    ),
    # Malformed outputs by the ten thousand.
    "parsers": Check(),
    # Templates that would take time or memory, and streams of tokens with any texts.
    "texts": Check(
        leaves_out=unwatched("no model runs", *NUMERICS),
    ),
    # Random requests in simulated steps.
    "scheduling": Check(
        leaves_out=unwatched("a simulation stands in for the model", *NUMERICS),
    ),
    # Compiled steps: when they compile, how large they are, what is kept on disk, what fits a device.
    "programs": Check(),
    # Grammars of hostile or many schemas.
    "constraints": Check(
        leaves_out=unwatched("no model runs", "models/*", "pallas_kernels/*"),
    ),
    # The programs of scripts/.
    "scripts": Check(
        leaves_out=unwatched("pyright holds scripts to the product's names and signatures", *PRODUCT),
    ),
    # Whole servers, engines in processes of their own, and loads upon them.
    "server": Check(
        leaves_out=unwatched("any tokens do; other checks hold them to HF's", "models/*", "pallas_kernels/*"),
    ),
    # What an engine makes of requests: parameters, grammars, drafts, adapters, batches, preemption, aborts.
    "engine": Check(pages=("docs/models.md",)),
    # More than SmolLM2 on one device.
    "device": Check(),
    # Every family in an engine, and draft heads.
    "families": Check(),
    # Kernels of TPUs, compiled by libtpu.
    "tpu_compiler": Check(
        programs=("scripts/compile.py", "scripts/lib.sh", "scripts/test.sh"),
        leaves_out=unwatched("kernels are compiled alone, without a model's step", "jaxllm/*", "models/*")
        | unwatched("they are not for TPUs", *CPU_KERNELS, *GPU_KERNELS),
    ),
    # Goldens of models notice every change of a model.
    "goldens_notice": Check(
        leaves_out=unwatched("the goldens are in question; `models` holds models to them", *PRODUCT),
    ),
}

IMPORTED_AS = {
    "PIL": ("pillow",),
    "google": ("protobuf", "googleapis-common-protos"),
    "grpc": ("grpcio",),
    "grpc_health": ("grpcio-health-checking",),
    "grpc_reflection": ("grpcio-reflection",),
    "opentelemetry": ("opentelemetry-sdk", "opentelemetry-exporter-otlp"),
    "yaml": ("pyyaml",),
    "zmq": ("pyzmq",),
}
"""Packages whose modules have other names."""


class Guard:
    """The checks of a source tree, its files as they are now, and the checks' records."""

    def __init__(self, root: Path = ROOT, checks: Mapping[str, Check] | None = None) -> None:
        self.root = root
        self.checks = CHECKS if checks is None else checks
        self.graph = SourceGraph(root)

    def tests(self, check: str) -> list[str]:
        """Return the files of tests that have a check's mark, sorted."""
        return sorted(path for path in self._test_files if check in self.graph.facts(path).marks)

    @property
    def _test_files(self) -> Iterator[str]:
        return (path for path in self.graph.files if path.startswith("tests/") and path.endswith(".py"))

    def files(self, check: str) -> dict[str, str | None]:
        """Return every file that a check depends on, each with a file that needs it. Raises if one is missing."""
        tests = self.tests(check)
        starts = {*tests, *self.checks[check].programs, *self._conftests(tests)}
        if missing := starts - self.graph.files:
            raise FileNotFoundError(f"{check} starts with {sorted(missing)}, which are no files: mend CHECKS")
        if not starts:
            raise LookupError(f"no test has the mark {check}: mark one, or remove it from CHECKS")
        left_out = re.compile("|".join(map(fnmatch.translate, self.checks[check].leaves_out)) or r"(?!)")
        return self.graph.closure(sorted(starts), lambda path: left_out.match(path) is not None)

    def _conftests(self, tests: list[str]) -> set[str]:
        folders = {str(folder) for test in tests for folder in Path(test).parents}
        return {f"{folder}/conftest.py" for folder in folders} & self.graph.files

    def digest(self, check: str) -> str:
        """Return the digest of a check's files, of its packages' versions and of pytest's settings."""
        files = self.files(check)
        total = hashlib.sha256()
        for path in sorted(files):
            total.update(f"{path} {self.graph.facts(path).digest}\n".encode())
        tops = {name.partition(".")[0] for path in files for name in self.graph.facts(path).names}
        for pin in sorted(pins((self.root / "requirements.lock").read_text(), tops)):
            total.update(f"{pin}\n".encode())
        for page in self.checks[check].pages:
            total.update((self.root / page).read_bytes())
        total.update(json.dumps(self._pytest_options, sort_keys=True).encode())
        return total.hexdigest()

    @cached_property
    def _pytest_options(self) -> dict[str, Any]:
        """Pytest's settings, such as the warnings that fail a test, without the list of marks."""
        settings = tomllib.loads((self.root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
        return {name: value for name, value in settings.items() if name != "markers"}

    def stamps(self, check: str) -> dict[str, tuple[int, int, int]]:
        """Return when each file of a check was last written: an edit that is undone leaves its content the same."""
        paths = (*self.files(check), *self.checks[check].pages)
        stats = {path: (self.root / path).stat() for path in paths}
        return {path: (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for path, stat in stats.items()}

    def machine(self, check: str) -> str:
        """Return the kind of machine for which a check's passing holds."""
        return f"{processor()}, {PYTHON}" if self.checks[check].each_processor else PYTHON

    def why_run(self, check: str) -> str | None:
        """Return why a check has to run, or None if it has passed on these sources and this kind of machine."""
        records, machine = self._read().get(check, {}), self.machine(check)
        if machine not in records:
            return f"has never passed on {machine}"
        digest = records[machine].split(", ")[0]
        return None if digest == self.digest(check) else f"its sources have changed since it passed on {machine}"

    def how_passed(self, check: str) -> str:
        """Return a line for a check that has passed: when, and how many tests were skipped, if the record has these."""
        _, *facts = self._read()[check][self.machine(check)].split(", ")
        return ", ".join(["passed before, on the same sources", *facts])

    def by_age(self) -> list[str]:
        """Return the checks: first those without a time of passing, then those that passed the longest ago."""
        records = self._read()

        def passed(check: str) -> str:
            facts = records.get(check, {}).get(self.machine(check), "").split(", ")
            return next(filter(TIME.fullmatch, facts), "")

        return sorted(self.checks, key=passed)

    def record(self, check: str, digest: str, skipped: int | None) -> None:
        """Keep that a check passed on the sources with a digest, and how many tests were skipped if pytest ran it."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        passed = ", ".join([digest, now, *([] if skipped is None else [f"{skipped} skipped"])])
        path = self.root / RECORD
        with path.open("a+") as file:  # other checks may pass at the same time
            fcntl.flock(file, fcntl.LOCK_EX)
            records = self._read()
            records.setdefault(check, {})[self.machine(check)] = passed
            kept = {name: records[name] for name in records if name in self.checks}
            path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")

    def _read(self) -> dict[str, dict[str, str]]:
        path = self.root / RECORD
        text = path.read_text() if path.exists() else ""
        return json.loads(text) if text else {}


def pins(lock: str, modules: set[str]) -> set[str]:
    """Return the lines of a lock file for packages with these modules, and for the packages that those require."""
    lines = {name_of(line): line for line in lock.splitlines() if re.match(r"[\w.-]+==", line)}
    waiting = {name for module in modules for name in IMPORTED_AS.get(module, (name_of(module),))}
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in lines and name not in needed:
            needed.add(name)
            waiting |= requirements(name)
    return {lines[name] for name in needed}


@cache
def requirements(package: str) -> frozenset[str]:
    """Return the packages that an installed package requires, without extras."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return frozenset()
    return frozenset(name_of(line) for line in lines if "extra ==" not in line)


def name_of(line: str) -> str:
    """Return the normalized name of the package that a requirement begins with."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*\w", line).group()).lower()  # pyright: ignore[reportOptionalMemberAccess]


@cache
def processor() -> str:
    """Return the kind of this processor, as far as kernels of CPUs and XLA's code for them depend on it."""
    sys.path.insert(0, str(ROOT))
    from pallas_kernels.native.processor import current

    kind = current()
    features = ["bf16"] * kind.has_bfloat16_dot + ["int8"] * kind.has_int8_dot
    return " ".join([platform.machine(), kind.name, *features])


def run(check: str, command: Sequence[str], root: Path = ROOT, checks: Mapping[str, Check] | None = None) -> int:
    """Run a check's command and return its exit status; record that it passed if the sources stayed the same."""
    guard = Guard(root, checks)
    before, stamps = guard.digest(check), guard.stamps(check)
    guard.graph.save()
    status, skipped = run_and_count_skipped(command)
    if status:
        return status
    after = Guard(root, checks)
    if after.digest(check) != before or after.stamps(check) != stamps:
        print(f"{check} passed, but its sources changed while it ran: not recorded, run it again", file=sys.stderr)
        return 1
    after.record(check, before, skipped)
    return 0


def run_and_count_skipped(command: Sequence[str]) -> tuple[int, int | None]:
    """Run a command; return its exit status, and how many tests were skipped, or None if pytest did not run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={shlex.quote(str(report))}"
        status = subprocess.run(command, check=False, env=os.environ | {"PYTEST_ADDOPTS": options}).returncode
        if not report.exists():
            return status, None
        outcomes = ET.parse(report).iter("skipped")
        return status, sum(outcome.get("type") == "pytest.skip" for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("status")
    for action in ("changed", "tests", "files", "run"):
        actions.add_parser(action).add_argument("check", choices=sorted(CHECKS))
    actions.choices["run"].add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if arguments.action == "run":
        return run(arguments.check, arguments.command)
    guard = Guard()
    status = 0
    match arguments.action:
        case "status":
            for check in guard.by_age():
                why = guard.why_run(check)
                print(f"{check}\t{'run' if why else 'passed'}\t{why or guard.how_passed(check)}")
        case "changed":
            status = 0 if guard.why_run(arguments.check) else 1
        case "tests":
            print("\n".join(guard.tests(arguments.check)))
        case "files":
            for path, needed_by in sorted(guard.files(arguments.check).items()):
                print(path if needed_by is None else f"{path}  needed by {needed_by}")
    guard.graph.save()
    return status


if __name__ == "__main__":
    sys.exit(main())

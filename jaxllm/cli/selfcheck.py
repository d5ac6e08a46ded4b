"""`jaxllm selfcheck` compares this device's kernels with the reference, at the shapes of a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.cli.flags.engine_flags import add_engine_flags, read_engine_args
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.selfcheck.device import find_accelerators
from jaxllm.selfcheck.process import examine
from jaxllm.selfcheck.report import Verdict, render, render_head
from jaxllm.utils.streams import say, show, writing


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "selfcheck",
        help="compare this device's kernels with the reference",
        description="Run each kernel that the model's steps would use on this machine's device, on ragged steps over "
        "poisoned memory, and compare it with the reference. Each runs in a child process and must end within 20 s. An "
        "engine with the same model and arguments then runs in plain XLA what is wrong here.",
        epilog="Exit status: 0 all is right, 1 a kernel is not, 2 misuse, 3 the check could not be done, 4 the report "
        "could not be written.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON, to send with a bug report")
    add_engine_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the verdicts as they come, and return the exit status."""
    from jaxllm.selfcheck.kept import keep_report, portable_args, report_path  # imports JAX

    settings = read_engine_args(args)
    if not settings.selfcheck:
        message = "selfcheck: this command is the check that the flag turns off at a start. Leave --no-selfcheck out."
        raise VLLMValidationError(message, parameter="selfcheck", value=False)
    engine_args = portable_args(settings)
    accelerators = find_accelerators()
    driver = "" if accelerators is None else accelerators.driver
    head = [render_head()]

    def tell(verdict: Verdict) -> None:
        show("\n".join([*head, render(verdict)]))
        head.clear()

    report = examine(engine_args, driver=driver, tell=tell)
    if accelerators is not None and report.platform not in ("", "cpu"):
        keep_report(report_path(engine_args, accelerators), report)
    if args.json is not None:
        with writing(args.json):
            Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if report.problem:
        say(f"jaxllm: error: {report.problem}.")
        return 3
    if not report.verdicts:
        show(f"all of this model runs in plain XLA on this {report.device}: there is no kernel to check")
    for op, reason in report.disproved().items():
        show(f"{op} {_consequence(op, settings)}: {reason.partition(' (`')[0]}")
    return 0 if report.is_right else 1


def _consequence(op: str, settings: EngineArgs) -> str:
    """Return what engines do about an op that is wrong: a backend that the user names runs all the same."""
    group = settings.attention_config
    if op in ("paged_attention", "latent_attention", "indexer") and group is not None and group.backend is not None:
        return f"runs all the same, because attention_config has backend={group.backend!r}"
    if op.startswith("linear") and settings.linear_backend != "auto":
        return f"runs all the same, because of linear_backend={settings.linear_backend!r}"
    return "will run in plain XLA"

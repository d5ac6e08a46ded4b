"""`jaxllm check` reports whether a model fits on hardware that this machine lacks, and how fast it would run there."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from jaxllm.check.process import ask
from jaxllm.check.table import render
from jaxllm.cli.flags.engine_flags import add_engine_flags, read_engine_args
from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.child_process import ChildError
from jaxllm.utils.streams import say, show


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "check",
        help="check whether a model fits on a TPU or GPU, without having one",
        description="Compile the engine's steps from config.json alone, with the real compiler for hardware that this "
        "machine may lack. Report whether they fit, how many requests run at once, and what bounds their speed.",
        epilog="Exit status: 0 it fits, 1 it does not, 2 misuse, 3 the compiler failed, 4 the report could not be "
        "written. Install compilers with "
        "pip install 'jaxllm[check]'.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="v5e:2x2, v6e:2x4, v5p:2x2x1, tpu7x:2x2x1, h100, h100:8, h200, b200, a100, ...",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_engine_flags(parser, "hub id, folder, config.json, or .gguf file")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    engine_args = read_engine_args(args)
    if args.topology is None:
        raise VLLMValidationError("say which --topology to check, such as v5e:2x2 or h100.", parameter="topology")
    try:
        report = ask(engine_args, args.topology)
    except ChildError as error:
        say(f"jaxllm: error: compiling for {args.topology} failed: {error}.")
        return 3
    if args.json:
        show(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        show(render(report))
    return 0 if report.fits else 1

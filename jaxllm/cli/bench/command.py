"""`jaxllm bench WHAT`: its subcommands."""

from __future__ import annotations

import argparse
from typing import Any

from jaxllm.cli.bench import serve, startup


def add_parser(commands: Any) -> dict[str, argparse.ArgumentParser]:
    """Add the subcommand and its own; return the parser of each by name, such as "bench serve"."""
    parser = commands.add_parser("bench", help="measure an engine, or a server", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    return {f"bench {name}": module.add_parser(kinds) for name, module in _MODULES.items()}


_MODULES = {"serve": serve, "startup": startup}

"""`jaxllm bench WHAT` and its subcommands."""

from __future__ import annotations

import argparse
from typing import Any

from jaxllm.cli.bench import offline, serve, startup


def add_parser(commands: Any) -> dict[str, argparse.ArgumentParser]:
    """Add the subcommand and its own subcommands; return their parsers by name, such as "bench serve"."""
    parser = commands.add_parser("bench", help="measure an engine, or a server", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    return {
        "bench serve": serve.add_parser(kinds),
        "bench throughput": offline.add_throughput_parser(kinds),
        "bench latency": offline.add_latency_parser(kinds),
        "bench startup": startup.add_parser(kinds),
    }

"""The arguments that programs have in common, and their files of results."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fetch_models import MODELS, default_dir, fetch

from lib.machine import ROOT, describe_sources, versions

RESULTS = ROOT / "benchmarks" / "results"


def make_parser(description: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--json`; `name` is its default, a file of benchmarks/results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "also write the figures to this file" if name is None else f"default: benchmarks/results/{name}"
    default = None if name is None else RESULTS / name
    parser.add_argument("--json", type=Path, default=default, metavar="OUT", help=shown)
    return parser


def make_server_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what programs that load a server have: `--model`, `--quick` and `--json`."""
    parser = make_parser(description)
    parser.add_argument("--model", type=Path, help=".gguf or folder (default: SmolLM2-135M, fetched)")
    parser.add_argument("--quick", action="store_true", help="shows that all runs, measures nothing and saves nothing")
    return parser


def find_model(args: argparse.Namespace) -> Path:
    """Return the path of the model, by default SmolLM2, which is fetched if it is missing. Raises FetchError."""
    return args.model or fetch(MODELS["smollm2"], default_dir())


def describe_server() -> dict[str, Any]:
    """Return the sources, the machine, and the versions of what serves."""
    packages = versions("jax", "uvicorn", "httptools", "uvloop", "aiohttp")
    return describe_sources() | {"versions": packages | {"python": platform.python_version()}}


def result_file(args: argparse.Namespace, name: str) -> Path | None:
    """Return where a program's record goes: `--json`, or else a file of benchmarks/results unless it was `--quick`."""
    return args.json or (None if args.quick else RESULTS / name)


def save(path: Path | None, record: Any) -> None:
    """Write a record as JSON, if there is a path for it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def save_part(path: Path | None, part: Mapping[str, Any]) -> None:
    """Print a part of a record, and write it beside the other parts of the file."""
    print(json.dumps(part, indent=1))
    saved = json.loads(path.read_text()) if path is not None and path.is_file() else {}
    save(path, {**saved, **part})

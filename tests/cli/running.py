"""Tests run `jaxllm generate` over a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxllm.cli import generate
from jaxllm.cli.config_file import apply_config_file
from jaxllm.cli.main import make_parser
from tests.cli.fake_engine import FakeEngine


def run_generate(engine: FakeEngine, *words: object) -> int:
    """Run the subcommand with the engine; model errors and the like propagate."""
    parser, commands = make_parser()
    texts = [str(word) for word in words]
    apply_config_file(commands["generate"], texts)
    args = parser.parse_args(["generate", *texts])
    return generate.run(args, lambda _engine_args: engine)


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    """Write objects as JSON lines; strings as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]

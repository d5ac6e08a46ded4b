"""Tests run `jaxllm generate` and `jaxllm embed` over a fake engine."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.cli.batch import embed, generate
from jaxllm.cli.config_file import apply_config_file
from jaxllm.cli.main import make_parser
from tests.cli.fake_engine import FakeEngine


def run_generate(engine: FakeEngine, *words: object) -> int:
    """Run the subcommand with the engine; model errors and the like propagate."""
    return generate.run(_parse("generate", words), lambda _engine_args: engine)


def run_embed(engine: FakeEngine, *words: object) -> int:
    """Run the subcommand with the engine; model errors and the like propagate."""
    return embed.run(_parse("embed", words), lambda _engine_args: engine)


def _parse(command: str, words: Sequence[object]) -> Namespace:
    parser, commands = make_parser()
    texts = [str(word) for word in words]
    apply_config_file(commands[command], texts)
    return parser.parse_args([command, *texts])


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    """Write objects as JSON lines; strings as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]

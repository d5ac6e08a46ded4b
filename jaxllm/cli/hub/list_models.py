"""`jaxllm list` lists the models in the hub's cache, and whether jaxllm can run them."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any

import msgspec

from jaxllm.cli.hub.cache_flag import add_cache_flag
from jaxllm.hub.cache import GIB, Ability, Cache, CachedModel, find_abilities
from jaxllm.utils.streams import say, show

_HEAD = ("NAME", "REVISION", "GiB", "LAST USED", "RUNS")
_COMMIT_LETTERS = 8
_MAX_REASON = 100


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "list",
        help="list the downloaded models",
        description="List the models in the hub's cache: revision, size, when the file system saw the largest file "
        "read last, and whether jaxllm can run the architecture.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array, with paths and whole reasons")
    add_cache_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the models and return the exit status."""
    cache = Cache(args.download_dir)
    models = cache.models()
    abilities = find_abilities(models) if models else []
    if args.json:
        entries = [_entry(*pair) for pair in zip(models, abilities, strict=True)]
        show(msgspec.json.format(msgspec.json.encode(entries), indent=1).decode())
    elif models:
        _show_table([_HEAD, *(_row(*pair) for pair in zip(models, abilities, strict=True))])
    else:
        say(f"there are no models in {cache.path}; `jaxllm pull NAME` downloads one")
    for name, size in cache.unfinished().items():
        say(f"{name}: {size / GIB:.2f} GiB of unfinished downloads; `jaxllm rm {name}` deletes them with the rest")
    return 0


def _entry(model: CachedModel, ability: Ability) -> dict[str, Any]:
    return {
        "name": model.name,
        "revision": model.revision,
        "refs": model.refs,
        "num_bytes": model.num_bytes,
        "last_used": datetime.fromtimestamp(model.last_used, UTC).isoformat(timespec="seconds"),
        "architecture": ability.architecture,
        "runs": not ability.reason,
        "reason": ability.reason or None,
        "path": str(model.path),
    }


def _row(model: CachedModel, ability: Ability) -> tuple[str, ...]:
    reason = ability.reason.partition(" (jaxllm.")[0].rstrip(".")
    runs = f"no: {reason}" if reason else "yes"
    if len(runs) > _MAX_REASON:
        runs = f"{runs[:_MAX_REASON]}..."
    revision = " ".join((model.revision[:_COMMIT_LETTERS], *model.refs))
    last_used = datetime.fromtimestamp(model.last_used).astimezone().strftime("%Y-%m-%d %H:%M")
    return model.name, revision, f"{model.num_bytes / GIB:.2f}", last_used, " ".join(runs.split())


def _show_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, revision, size, last_used, runs in rows:
        first, second, third, fourth, _ = widths
        show(f"{name:<{first}}  {revision:<{second}}  {size:>{third}}  {last_used:<{fourth}}  {runs}")

"""`jaxllm rm` deletes a model from the hub's cache."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any

from jaxllm.cli.hub.cache_flag import add_cache_flag
from jaxllm.exceptions import VLLMValidationError
from jaxllm.hub.cache import GIB, Cache, CachedModel
from jaxllm.utils.streams import say, show

_NUM_NEAR = 5
_ALIKE = 0.5
"""The least similarity of two names, from 0 to 1, at which one is suggested for the other."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "rm",
        help="delete a downloaded model",
        description="Delete a model from the hub's cache: all its revisions, one, or one GGUF file. It asks first.",
        epilog="Exit status: 0 deleted, 1 not deleted, 2 misuse.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", metavar="NAME", help="hub id, as `jaxllm list` shows it; ORG/NAME:QUANT for that GGUF file alone"
    )
    parser.add_argument("--revision", metavar="REV", help="only this branch, tag or commit")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    add_cache_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Delete the model, print what this has freed, and return the exit status."""
    from jaxllm.hub.removal import plan_removal

    cache, (name, _, quant) = Cache(args.download_dir), args.name.partition(":")
    removal = plan_removal(cache, name, _find(cache, name, args.revision), quant)
    revisions = ", ".join(removal.revisions)
    if not args.yes and not _agreed(f"delete {args.name} ({revisions}) and free {removal.num_bytes / GIB:.2f} GiB?"):
        say("nothing is deleted")
        return 1
    if (left := removal.execute()) is not None:
        say(f"jaxllm: error: {left} cannot be deleted.")
        return 1
    show(f"deleted {args.name} ({revisions}): freed {removal.num_bytes / GIB:.2f} GiB")
    return 0


def _find(cache: Cache, name: str, revision: str | None) -> list[CachedModel]:
    """Return the revisions to delete. Raises VLLMValidationError if there is none."""
    models = cache.models()
    named = [model for model in models if model.name == name]
    if not named:
        near = _near(name, sorted({model.name for model in models}))
        hint = f"near it are {', '.join(near)}" if near else "`jaxllm list` shows what there is"
        message = f"there is no model {name!r} in {cache.path}: {hint}."
        raise VLLMValidationError(message, parameter="model", value=name)
    chosen = [model for model in named if revision is None or model.is_at(revision)]
    if not chosen:
        known = ", ".join(" ".join((model.revision, *model.refs)) for model in named)
        message = f"{name!r} has no revision {revision!r} in {cache.path}: it has {known}."
        raise VLLMValidationError(message, parameter="revision", value=revision)
    return chosen


def _near(name: str, known: list[str]) -> list[str]:
    """Return the names that are like one, or contain it, the nearest first."""
    folded = {each.lower(): each for each in known}
    wanted = name.lower()
    alike = difflib.get_close_matches(wanted, folded, n=_NUM_NEAR, cutoff=_ALIKE)
    holding = [each for each in folded if wanted in each]
    return [folded[each] for each in dict.fromkeys((*holding, *alike))][:_NUM_NEAR]


def _agreed(question: str) -> bool:
    """Ask on standard error and return whether the answer is yes. Raises VLLMValidationError if there is none."""
    say(f"{question} [y/N]")
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:
        message = "nobody answers on standard input: give --yes to delete without being asked."
        raise VLLMValidationError(message, parameter="yes")
    return answer.strip().lower() in ("y", "yes")

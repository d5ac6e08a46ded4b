"""The flags shared by subcommands with an engine: MODEL, --config, and one per engine argument."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import msgspec

from jaxllm.cli.flags.help import add_help
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs

_ENGINE_ONLY = ("hf_token", "enforce_eager", "download_dir", "use_tqdm_on_load", "max_logprobs")
"""Model and loading arguments that change no result, so a resumed run may change them."""


def add_engine_flags(parser: argparse.ArgumentParser, models: str | None = "hub id, folder, or .gguf file") -> None:
    """Add the engine's arguments, and --help, after all other arguments. `models` describes MODEL in the help; with
    None the model is named by --model alone.
    """
    if models is None:
        parser.set_defaults(model_tag=None)
    else:
        parser.add_argument("model_tag", metavar="MODEL", nargs="?", help=models)
    parser.add_argument("--config", metavar="FILE.yaml", help="flags and their values; the command line wins")
    EngineArgs.add_cli_args(parser)
    add_help(parser, EngineArgs)


def read_engine_args(args: argparse.Namespace, kind: type[EngineArgs] = EngineArgs) -> EngineArgs:
    """Return the checked engine arguments of a command line. Raises VLLMValidationError, also without a MODEL."""
    if args.model_tag is not None:
        args.model = args.model_tag
    if args.model is None:
        raise VLLMValidationError("say which MODEL: a hub id, a folder, or a file.", parameter="model")
    return kind.from_cli_args(args)


def changed_engine_flags(args: argparse.Namespace) -> list[str]:
    """Return the names of the engine arguments that a command line, or its file, has changed.

    For commands, disable_log_stats is True by default.
    """
    changed = []
    for field in dataclasses.fields(EngineArgs):
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name == "disable_log_stats":
            default = True
        if getattr(args, field.name, default) != default:
            changed.append(field.name)
    return changed


def result_settings(engine_args: EngineArgs, *others: Any) -> bytes:
    """Return the settings that results depend on, besides a prompt's line, but not those of scheduling and memory."""
    kept = {
        field.name: repr(getattr(engine_args, field.name))
        for field in dataclasses.fields(engine_args)
        if field.metadata["group"] in ("ModelConfig", "LoadConfig") and field.name not in _ENGINE_ONLY
    }
    return msgspec.json.encode([kept, *others])

"""Subcommands that name an engine share these flags: MODEL, --config, and one per engine argument."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import msgspec

from jaxllm.config.engine_args import EngineArgs
from jaxllm.exceptions import VLLMValidationError

_ENGINE_ONLY = ("hf_token", "enforce_eager", "download_dir", "use_tqdm_on_load", "max_logprobs")
"""These model and loading arguments change no result, so a resumed run may change them."""


def add_engine_flags(parser: argparse.ArgumentParser, models: str = "hub id, folder, or .gguf file") -> None:
    """Add the arguments. `models` says what MODEL may be."""
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help=models)
    parser.add_argument("--config", metavar="FILE.yaml", help="flags and their values; the command line wins")
    EngineArgs.add_cli_args(parser)


def read_engine_args(args: argparse.Namespace, kind: type[EngineArgs] = EngineArgs) -> EngineArgs:
    """Return the engine arguments of a command line, checked. Raises VLLMValidationError, also without a MODEL."""
    if args.model_tag is not None:
        args.model = args.model_tag
    if args.model is None:
        raise VLLMValidationError("say which MODEL: a hub id, a folder, or a file.", parameter="model")
    return kind.from_cli_args(args)


def result_settings(engine_args: EngineArgs, *others: Any) -> bytes:
    """Return all that results depend on besides a prompt's line; scheduling and memory settings change none."""
    kept = {
        field.name: repr(getattr(engine_args, field.name))
        for field in dataclasses.fields(engine_args)
        if field.metadata["group"] in ("ModelConfig", "LoadConfig") and field.name not in _ENGINE_ONLY
    }
    return msgspec.json.encode([kept, *others])

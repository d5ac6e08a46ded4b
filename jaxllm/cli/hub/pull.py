"""`jaxllm pull` downloads a model into the hub's cache: the files that `jaxllm serve` would read, and no others."""

from __future__ import annotations

import argparse
from typing import Any

from jaxllm.cli.hub.cache_flag import add_cache_flag
from jaxllm.hub.cache import GIB, Cache
from jaxllm.utils.streams import show


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "pull",
        help="download a model",
        description="Download the files of a model that an engine reads, and no others, into the hub's cache. What is "
        "there already is not downloaded again. A model that jaxllm cannot run is refused before its weights.",
        epilog="Exit status: 0 it is in the cache, 2 misuse, or it cannot be had or run.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="hub id; of a repository with several GGUF files ORG/NAME:QUANT")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit; default: main")
    parser.add_argument("--load-format", default="auto", metavar="FORMAT", help="which weights, as of an engine")
    parser.add_argument("--hf-token", metavar="TOKEN", help="access token of the hub; default: the one stored")
    add_cache_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Download the model, print its size and folder, and return the exit status."""
    from jaxllm.hub.pull import pull

    pull(
        args.name,
        revision=args.revision,
        load_format=args.load_format,
        token=args.hf_token,
        download_dir=args.download_dir,
    )
    repository = args.name.partition(":")[0]
    for model in Cache(args.download_dir).models():
        if model.name == repository and model.is_at(args.revision or "main"):
            show(f"{args.name}: {model.num_bytes / GIB:.2f} GiB, revision {model.revision}, in {model.path}")
    return 0

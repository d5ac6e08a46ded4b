"""The entry point of the command line: it runs a subcommand, and turns user errors into one line and a status."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

import jaxllm
from jaxllm.cli import check, collect_env, selfcheck, serve
from jaxllm.cli.batch import embed, generate, run_batch, transcribe
from jaxllm.cli.bench import command as bench
from jaxllm.cli.client import chat, complete
from jaxllm.cli.config_file import apply_config_file
from jaxllm.cli.hub import list_models, pull, remove
from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.argparse_utils import FlexibleArgumentParser
from jaxllm.utils.log import show_log
from jaxllm.utils.streams import OutputError, flush_messages, flush_output, prepare_streams, say

_INSTEAD = {
    "run": "`jaxllm chat --model MODEL` talks with a model, `jaxllm generate MODEL` completes prompts",
    "ls": "it is `jaxllm list`",
    "ps": "a server's /v1/models lists what it serves",
    "download": "it is `jaxllm pull`",
    "remove": "it is `jaxllm rm`",
    "delete": "it is `jaxllm rm`",
    "env": "it is `jaxllm collect-env`",
    "version": "it is `jaxllm --version`",
    "help": "it is `jaxllm --help`",
}
"""Hints for commands that other programs have."""
_OUTPUT_STATUS = 4
"""The exit status of a command that could not write its results."""


def make_parser() -> tuple[FlexibleArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the whole parser, and each subcommand's own by name, such as "serve" and "bench serve"."""
    parser = FlexibleArgumentParser(
        prog="jaxllm", description="LLM inference on JAX, with vLLM's names.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=jaxllm.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    return parser, {
        "generate": generate.add_parser(commands),
        "embed": embed.add_parser(commands),
        "transcribe": transcribe.add_parser(commands),
        "serve": serve.add_parser(commands),
        "chat": chat.add_parser(commands),
        "complete": complete.add_parser(commands),
        "run-batch": run_batch.add_parser(commands),
        "pull": pull.add_parser(commands),
        "list": list_models.add_parser(commands),
        "rm": remove.add_parser(commands),
        "check": check.add_parser(commands),
        "selfcheck": selfcheck.add_parser(commands),
        **bench.add_parser(commands),
        "collect-env": collect_env.add_parser(commands),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done, 2 misuse, 4 results could not be written, 130 interrupted.

    The commands' own help explains other statuses.
    """
    prepare_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            flush_output()
    except OutputError as error:
        say(f"jaxllm: error: {error}")
        return _OUTPUT_STATUS
    finally:
        flush_messages()


def _run(words: list[str]) -> int:
    parser, commands = make_parser()
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in commands), None)
    parser.command = commands.get(name or "")
    try:
        _refuse_other_command(words, {each.partition(" ")[0] for each in commands})
        if name is not None:
            apply_config_file(commands[name], words[len(name.split()) :])
        args = parser.parse_args(words)
        show_log()
        return args.run(args)
    except VLLMValidationError as error:
        say(f"jaxllm: error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _refuse_other_command(words: list[str], known: set[str]) -> None:
    """Raise VLLMValidationError for an unknown command, with a hint."""
    name = words[0] if words else "-"
    if name.startswith("-") or name in known:
        return
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = _INSTEAD.get(name) or (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}")
    raise VLLMValidationError(
        f"there is no command {name!r}: {hint.rstrip('.')}.".replace("?.", "?"), parameter="COMMAND"
    )

"""`jaxllm complete` continues texts with a server's model; each line is a prompt."""

from __future__ import annotations

import argparse
from typing import Any

from jaxllm.cli.client.openai_client import Choice, RequestError
from jaxllm.cli.client.remote_model import RemoteModel, add_remote_flags
from jaxllm.cli.client.talk import Write, talk
from jaxllm.cli.flags.sampling_flags import add_talk_sampling, talk_sampling
from jaxllm.utils.streams import say


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "complete",
        help="continue texts with a server's model",
        description="Continue texts: with --quick one, otherwise each line of standard input. The model is that of a "
        "server with OpenAI's API.",
        epilog="Exit status: 0 done, 1 the server does not answer or a request failed, 2 misuse, "
        "4 results could not be written, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="continue this, then exit")
    parser.add_argument("--config", metavar="FILE.yaml", help="flags and their values; the command line wins")
    parser.add_argument("--stats", action="store_true", help="show the times of each answer on standard error")
    add_remote_flags(parser.add_argument_group("server"))
    add_talk_sampling(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Continue all texts and return the exit status."""
    try:
        model = RemoteModel.find(args)
    except RequestError as error:
        say(f"jaxllm: error: {error}")
        return 1
    return talk(_Completions(model, talk_sampling(args), args.stats), args.quick, shows_stats=args.stats)


class _Completions:
    """Answers a text with its continuation."""

    def __init__(self, model: RemoteModel, fields: dict[str, Any], counts: bool) -> None:
        self._model, self._fields, self._counts = model, fields, counts

    def answer(self, message: str, write: Write) -> int:
        """Write the continuation of a text."""

        def take(choice: Choice) -> None:
            if choice.text:
                write(choice.text)

        return self._model.stream("/completions", {"prompt": message, **self._fields}, take, counts=self._counts)

"""`jaxllm chat` talks with a model: a server's, or with --model one that runs in this process."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxllm.cli.batch.offline_run import Engine, load_chat_engine
from jaxllm.cli.client.openai_client import Choice, RequestError
from jaxllm.cli.client.pictures import picture_url
from jaxllm.cli.client.remote_model import RemoteModel, add_remote_flags
from jaxllm.cli.client.talk import Write, talk
from jaxllm.cli.flags.engine_flags import add_engine_flags, changed_engine_flags, read_engine_args
from jaxllm.cli.flags.sampling_flags import add_talk_sampling, talk_defaults, talk_sampling
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.utils.interrupts import deferred_interrupts
from jaxllm.utils.streams import say

type _Messages = list[dict[str, Any]]

_IMAGE = "/image "
"""What a line begins with that names a picture's file for the next message."""


class _ChatModel(Protocol):
    """A model that answers conversations."""

    def reply(self, messages: _Messages, write: Write) -> int:
        """Write the answer piece by piece and return its number of tokens."""
        ...


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "chat",
        help="talk with a server's model, or with one in this process",
        description="Talk with a model: with --quick send one message, otherwise each line of standard input. The "
        "model is that of a server with OpenAI's API, or with --model runs in this process.",
        epilog="Exit status: 0 done, 1 the server does not answer or a request failed, 2 misuse, 3 the engine has "
        "ended, 4 results could not be written, 130 interrupted.",
        allow_abbrev=False,
        add_help=False,
        conflict_handler="resolve",  # -q and --seed are an engine's flags too; below, they are this command's
    )
    parser.usage = "%(prog)s [--url URL | --model MODEL] [--FLAG VALUE ...]"
    server = parser.add_argument_group("server")
    add_engine_flags(parser, "the same as --model")
    add_remote_flags(server)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this, show the answer, then exit")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message before the first message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        help="picture that goes with the first message; may be given again. In a talk at a terminal, /image FILE adds "
        "one to the next message",
    )
    parser.add_argument("--stats", action="store_true", help="show the times of each answer on standard error")
    add_talk_sampling(parser)
    parser.set_defaults(run=run, disable_log_stats=True)
    return parser


def run(args: argparse.Namespace, make_engine: Callable[[EngineArgs], Engine] | None = None) -> int:
    """Talk, and return the exit status. All arguments are checked before a model loads."""
    fields = talk_sampling(args)
    pictures = [picture_url(path) for path in args.image or ()]
    try:
        if args.model_tag is None and args.model is None:
            _refuse_engine_flags(args)
            model = RemoteModel.find(args)
            chat = _RemoteChat(model, {**talk_defaults(model.defaults, fields), **fields}, args.stats)
            return _talk(chat, args, pictures)
        return _talk_here(args, fields, pictures, make_engine or load_chat_engine)
    except RequestError as error:
        say(f"jaxllm: error: {error}")
        return 1


def _talk(model: _ChatModel, args: argparse.Namespace, pictures: list[str]) -> int:
    conversation = _Conversation(model, args.system_prompt, pictures)
    return talk(conversation, args.quick, shows_stats=args.stats, obey=conversation.obey)


def _talk_here(
    args: argparse.Namespace,
    fields: dict[str, Any],
    pictures: list[str],
    make_engine: Callable[[EngineArgs], Engine],
) -> int:
    for name in ("url", "model_name", "api_key"):
        if getattr(args, name) is not None:
            message = f"{name} is of a server; leave it out, or MODEL, which runs in this program."
            raise VLLMValidationError(message, parameter=name, value=getattr(args, name))
    SamplingParams(**fields)
    engine = make_engine(read_engine_args(args))
    try:
        return _talk(_EngineChat(engine, fields), args, pictures)
    except EngineDeadError as error:
        say(f"jaxllm: error: {error}")
        return 3
    finally:
        engine.shutdown()


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    """Raise VLLMValidationError for an engine's flags when no engine is to run."""
    changed = [name for name in changed_engine_flags(args) if name != "seed"]
    if changed:
        message = f"{changed[0]} is of an engine in this program: name its --model, or leave {changed[0]} out."
        raise VLLMValidationError(message, parameter=changed[0], value=getattr(args, changed[0]))


class _Conversation:
    """A conversation: answers each message with all earlier ones as context."""

    def __init__(self, model: _ChatModel, system_prompt: str | None, pictures: Sequence[str] = ()) -> None:
        """Send `pictures`, which are URLs, with the first message."""
        self._model, self._pictures = model, list(pictures)
        self._messages: _Messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]

    def obey(self, line: str) -> str | None:
        """Take the picture that a line names, and return a sentence about it; None for a line that is a message."""
        if not line.startswith(_IMAGE):
            return None
        path = line.removeprefix(_IMAGE).strip()
        self._pictures.append(picture_url(path))
        return f"{path} goes with the next message."

    def answer(self, message: str, write: Write) -> int:
        """Write the answer. The part written before a stop or failure stays in the conversation."""
        content: Any = message
        if self._pictures:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self._pictures]
            content, self._pictures = [*parts, {"type": "text", "text": message}], []
        asked = [*self._messages, {"role": "user", "content": content}]
        pieces: list[str] = []

        def take(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        try:
            return self._model.reply(asked, take)
        finally:
            if pieces:
                self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


class _RemoteChat:
    """Answers conversations with a server's model."""

    def __init__(self, model: RemoteModel, fields: Mapping[str, Any], counts: bool) -> None:
        self._model, self._fields, self._counts = model, fields, counts

    def reply(self, messages: _Messages, write: Write) -> int:
        """Write the answer."""

        def take(choice: Choice) -> None:
            if choice.delta is not None and choice.delta.content:
                write(choice.delta.content)

        return self._model.stream(
            "/chat/completions", {"messages": messages, **self._fields}, take, counts=self._counts
        )


class _EngineChat:
    """Answers conversations with an engine in this process."""

    def __init__(self, engine: Engine, fields: Mapping[str, Any]) -> None:
        self._engine = engine
        defaults = engine.front.ready.default_sampling_params
        self._sampling = {"max_tokens": None, **defaults, **talk_defaults(defaults, fields), **fields}
        self._sampling["output_kind"] = RequestOutputKind.DELTA
        self._num_asked = 0

    def reply(self, messages: _Messages, write: Write) -> int:
        """Write the answer; Ctrl-C ends it between two steps."""
        prompt = self._engine.front.chat_renderer.render(messages, "messages")
        self._num_asked += 1
        name, num_tokens = str(self._num_asked), 0
        self._engine.add_request(name, prompt, SamplingParams(**self._sampling), grammar_seconds=0)
        try:
            with deferred_interrupts() as check:
                while self._engine.has_unfinished_requests():
                    for completion in [each for output in self._engine.step() for each in output.outputs]:
                        num_tokens += len(completion.token_ids)
                        if completion.text:
                            write(completion.text)
                        if completion.finish_reason == "error":
                            raise RequestError(str(completion.stop_reason))
                    check()
        finally:
            self._engine.abort_request(name)
        return num_tokens

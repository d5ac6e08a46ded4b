"""Helpers that start servers and send requests."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.app import build_app, init_app_state
from jaxllm.server.http.connection import bounded_protocol
from jaxllm.server.run import bind
from jaxllm.utils.argparse_utils import FlexibleArgumentParser
from tests.async_engine.support import mock_llm, tiny_args

START_SECONDS = 30.0
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Answer:
    """A server's answer."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes

    @property
    def json(self) -> Any:
        """Return the body, which is JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Return the events of a stream without comments; it must end with [DONE]."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    @property
    def named_events(self) -> list[Any]:
        """Return the events of a stream without comments and [DONE]; frames must be named by the events' types."""
        events = []
        for frame in self.body.decode().split("\n\n")[:-1]:
            if not frame.startswith(":") and frame != "data: [DONE]":
                name, data = frame.split("\n")
                events.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {events[-1]['type']}"
        return events


@dataclass(frozen=True)
class Served:
    """A server that runs in a thread of this process."""

    port: int
    app: Any
    llm: AsyncLLM
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """Return the address without a path."""
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, seconds: float = 30
    ) -> Answer:
        """Send a request with a body of bytes, or a value to send as JSON; return the whole answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        sent = {} if body is None else {"content-type": "application/json"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            shown = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, shown, response.read())

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Make a GET request."""
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Make a POST request."""
        return self.ask("POST", path, body, headers)


def command_line(*words: str, model: str = "m") -> argparse.Namespace:
    """Return the parsed command line `jaxllm serve MODEL *words`."""
    parser = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(parser)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model", model, *words])


@contextlib.contextmanager
def mock_served(
    tokenizer: str, *words: str, tokens_per_second: float | None = 1000, around: Callable[[Any], Any] = lambda app: app
) -> Iterator[Served]:
    """Serve a new engine without a model, with the flags `words`, and what `around` puts around the application."""
    args = tiny_args(tokenizer, chat_template=TEMPLATE)
    with mock_llm(args, tokens_per_second=tokens_per_second) as llm, served(llm, *words, around=around) as server:
        yield server


@contextlib.contextmanager
def served(llm: AsyncLLM, *words: str, around: Callable[[Any], Any] = lambda app: app) -> Iterator[Served]:
    """Serve an engine, with the flags `words`. The engine belongs to the event loop of the first server that runs it:
    others beside it have the routes that do not.
    """
    args = command_line("--host", "127.0.0.1", "--port", "0", "--served-model-name", "tiny", *words)
    listener = bind(ServerArgs.from_cli_args(args))
    app = build_app(args)
    server = uvicorn.Server(
        uvicorn.Config(
            around(app), loop="uvloop", http=bounded_protocol(app.state.server_args), log_config=None, lifespan="off"
        )
    )
    loops: list[asyncio.AbstractEventLoop] = []
    is_started = threading.Event()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await init_app_state(llm, await llm.get_vllm_config(), app.state, args)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        is_started.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="server")
    thread.start()
    try:
        if not is_started.wait(START_SECONDS):  # `python -O`, under which some tests run, would leave an assert out
            raise TimeoutError("the server has not started")
        yield Served(listener.getsockname()[1], app, llm, loops[0])
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
        assert not thread.is_alive()

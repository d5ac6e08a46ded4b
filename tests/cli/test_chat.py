"""`jaxllm chat` and `jaxllm complete` against a server, at a terminal too, and `chat` on an engine of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.cli.client import chat
from jaxllm.cli.client.openai_client import RequestError
from jaxllm.cli.client.remote_model import RemoteModel
from jaxllm.cli.main import main, make_parser
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.sampling_params import SamplingParams
from tests.cli.fake_engine import FakeEngine
from tests.engine.support import byte_level
from tests.server.support import Served, mock_served, served

pytestmark = pytest.mark.server

SECONDS = 20.0


def ask(*words: str) -> int:
    """Run the command line."""
    return main(list(words))


def expected(server: Served, route: str, body: dict[str, Any]) -> str:
    """Return what the server answers without a stream: an engine without a model begins where the seed says."""
    answer = server.post(route, {"max_tokens": 5, "seed": 7, **body})
    assert answer.status == 200
    (choice,) = answer.json["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_a_quick_message(mock_server: Served, capsys: pytest.CaptureFixture[str]):
    text = expected(mock_server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    sampling = ("--max-tokens", "5", "--seed", "7")
    for url in (mock_server.url, mock_server.url + "/v1", mock_server.url + "/v1/"):
        assert ask("chat", "--url", url, "-q", "hello", *sampling, "--stats") == 0
        shown = capsys.readouterr()
        assert shown.out == text + "\n"
        assert "(5 tokens in " in shown.err


def test_completions(mock_server: Served, capsys: pytest.CaptureFixture[str]):
    text = expected(mock_server, "/v1/completions", {"prompt": "hello"})
    words = ("complete", "--url", mock_server.url, "--model-name", "tiny", "--max-tokens", "5", "--seed", "7")
    assert ask(*words, "--quick", "hello") == 0
    assert capsys.readouterr() == (text + "\n", "")
    assert ask(*words, "--temperature", "9", "-q", "hello") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("jaxllm: error: 400: temperature")


def test_the_key_is_the_flags_or_the_environments(mock: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    """The server is one of several in front of its engine, and answers what does not run that."""
    with served(mock, "--api-key", "secret") as server:

        def find(*words: str) -> str:
            args = make_parser()[0].parse_args(["chat", "--url", server.url, *words])
            return RemoteModel.find(args).name

        assert find("--api-key", "secret") == "tiny"
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert find() == "tiny"
        with pytest.raises(RequestError, match="401"):
            find("--api-key", "other")


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_server_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]):
    assert ask(command, "--url", "http://127.0.0.1:9/v1", "-q", "a") == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("jaxllm: error: http://127.0.0.1:9/v1/models: ")
    assert "name one with --url" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-model-len", "4k"), "max_model_len is of an engine in this program"),
        (("--no-disable-log-stats",), "disable_log_stats is of an engine"),
        (("--model", "m", "--url", "http://a"), "url is of a server"),
        (("m", "--model-name", "a"), "model_name is of a server"),
        (("m", "--temperature", "-1"), "temperature"),
        (("m", "--seed", str(2**64)), "seed"),
        (("m", "--enable-cumem-allocator"), "enable_cumem_allocator=True is not supported"),
        (("--url", "localhost:8000"), "is no URL of a server"),
    ],
)
def test_misuse_is_refused_before_anything_loads(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert ask("chat", "-q", "a", *words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_server_is_asked_without_jax(mock_server: Served):
    program = (
        "import json, sys; from jaxllm.cli.main import main\n"
        f"assert main(['chat', '--url', {mock_server.url!r}, '-q', 'a', '--max-tokens', '2']) == 0\n"
        "print(json.dumps([name for name in ('jax', 'transformers', 'numpy', 'fastapi') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


class Person:
    """Someone at a terminal with a command."""

    def __init__(self, terminal: int, process: subprocess.Popen[bytes]) -> None:
        self._terminal, self.process = terminal, process
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def leave_line(self) -> None:
        """Press Ctrl-C at the mark until there is a new one: Python sees a key that comes just before it waits for
        one, but not before the next.
        """
        for _ in range(int(SECONDS)):
            self.type("\x03")
            with contextlib.suppress(TimeoutError):
                self.see("\r\n> ", seconds=1)
                return
        raise AssertionError("Ctrl-C does nothing")

    def see(self, pattern: str, seconds: float = SECONDS) -> str:
        """Wait for something on the screen and return it; what comes after it is still to be seen."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self._unread, re.DOTALL)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(self._unread)
            if select.select([self._terminal], [], [], 0.1)[0]:
                self._unread += os.read(self._terminal, 65_536).decode(errors="replace")
        self._unread = self._unread[match.end() :]
        return match[0]


@contextlib.contextmanager
def at_terminal(*words: str) -> Iterator[Person]:
    """Run the command line in a pseudo-terminal of its own session."""
    ours, theirs = pty.openpty()
    program = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "-m", "jaxllm.cli", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    try:
        yield Person(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_person_stops_an_answer_edits_a_line_and_ends_the_talk(tokenizer: str):
    with (
        mock_served(tokenizer, tokens_per_second=50) as server,
        at_terminal("chat", "--url", server.url, "--seed", "7") as person,
    ):
        person.see("Ctrl-C stops an answer, Ctrl-D ends.\r\n.*> ")
        person.type("first\r")
        person.see("first\r\n.{3}")
        assert server.app.state.load.num_requests == 1
        person.type("\x03")
        person.see("\r\n> ")
        deadline = time.monotonic() + SECONDS
        while server.app.state.load.num_requests:  # the answer has ended on the server too
            assert time.monotonic() < deadline
            time.sleep(0.01)
        person.leave_line()
        person.type("\x1b[A")  # the arrow up
        person.see("first")
        person.type("\r")
        person.see("\r\n.{3}")
        person.type("\x03")
        person.see("> ")
        person.type("\x04")
        assert person.process.wait(SECONDS) == 0


class ChatEngine(FakeEngine):
    """A fake engine gives a request's whole answer at the second of its steps; someone may press Ctrl-C in one."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(tokenizer=byte_level(bos=True), **fields)
        self.num_steps = 0
        self.presses_at: int | None = None

    def step(self) -> list[Any]:
        self.num_steps += 1
        if self.num_steps == self.presses_at:
            signal.raise_signal(signal.SIGINT)
        return [] if self.num_steps % 2 else super().step()


def run_here(engine: Any, *words: str) -> int:
    """Talk with a fake engine."""
    return chat.run(make_parser()[0].parse_args(["chat", "m", *words]), lambda _args: engine)


def test_ctrl_c_ends_an_answer_between_steps_and_the_engine_goes_on():
    engine = ChatEngine()
    engine.presses_at = 1
    model = chat._EngineChat(engine, {})
    message = [{"role": "user", "content": "a"}]
    with pytest.raises(KeyboardInterrupt):
        model.reply(message, print)
    assert (engine.num_steps, engine.aborted) == (1, ["1"])
    engine.num_steps = 2
    pieces: list[str] = []
    assert model.reply(message, pieces.append) == 3
    assert len(pieces) == 1
    assert engine.requests[-1][2].max_tokens is None, "an answer is as long as the model has it"


def test_the_engine_is_shut_down_whatever_happens(capsys: pytest.CaptureFixture[str]):
    engine = ChatEngine(crash=RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        run_here(engine, "-q", "a")
    assert engine.num_shutdowns == 1
    good = ChatEngine()
    assert run_here(good, "-q", "a", "--temperature", "0.5", "--seed", "3") == 0
    assert good.num_shutdowns == 1
    params = good.requests[0][2]
    assert (params.temperature, params.seed) == (0.5, 3)
    assert capsys.readouterr().out.count("\n") > 0


def test_a_talk_with_an_engine_says_what_llm_chat_says(
    offline: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    params = SamplingParams(temperature=0, max_tokens=6)
    messages: list[Any] = []
    for text in ("hello", "and then?"):
        messages.append({"role": "user", "content": text})
        answer = offline.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
    monkeypatch.setattr(offline.llm_engine, "shutdown", lambda: None)
    read, write = os.pipe()
    os.write(write, b"hello\nand then?\n")
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run_here(offline.llm_engine, "--temperature", "0", "--max-tokens", "6") == 0
    assert capsys.readouterr().out == "".join(each["content"] + "\n" for each in messages[1::2])

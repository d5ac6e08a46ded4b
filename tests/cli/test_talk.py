"""A talk goes on over errors and Ctrl-C at a terminal, and ends with them elsewhere; a conversation remembers."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.client.chat import _Conversation
from jaxllm.cli.client.openai_client import RequestError
from jaxllm.cli.client.talk import MARK, Write, talk
from jaxllm.exceptions import VLLMValidationError


class Model:
    """Answers a conversation with how many messages it has, in two pieces; some messages end it otherwise."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, Any]]] = []

    def reply(self, messages: list[dict[str, Any]], write: Write) -> int:
        self.asked.append([(each["role"], each["content"]) for each in messages])
        write("answer ")
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        if messages[-1]["content"] == "fail":
            raise RequestError("no more")
        if messages[-1]["content"] == "bad":
            raise VLLMValidationError("too long", parameter="messages")
        write(str(len(messages)))
        return 2


class Terminal(io.TextIOWrapper):
    """Standard input that says whether it is a terminal."""

    def __init__(self, content: bytes, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def hold(
    monkeypatch: pytest.MonkeyPatch, content: bytes, *, is_terminal: bool = False, **options: Any
) -> tuple[Model, int]:
    """Talk with a model, with some content on standard input."""
    monkeypatch.setattr(sys, "stdin", Terminal(content, is_terminal=is_terminal))
    model = Model()
    conversation = _Conversation(model, options.pop("system_prompt", None), options.pop("pictures", ()))
    return model, talk(conversation, options.pop("quick", None), obey=conversation.obey, **options)


def test_each_line_of_a_pipe_is_a_message_in_the_light_of_those_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, status = hold(monkeypatch, "ä\r\n\n  \nb".encode(), system_prompt="be brief")
    assert status == 0
    first = [("system", "be brief"), ("user", "ä")]
    assert model.asked == [first, [*first, ("assistant", "answer 2"), ("user", "b")]]
    assert capsys.readouterr() == ("answer 2\nanswer 4\n", "")


def test_a_quick_message_leaves_standard_input_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, status = hold(monkeypatch, b"more", quick="one", is_terminal=True, shows_stats=True)
    assert (status, model.asked) == (0, [[("user", "one")]])
    shown = capsys.readouterr()
    assert shown.out == "answer 1\n"
    assert shown.err.startswith("TTFT ")
    assert "(2 tokens in " in shown.err


def test_an_error_ends_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    model, status = hold(monkeypatch, b"fail\nb\n")
    assert (status, len(model.asked)) == (1, 1)
    assert capsys.readouterr() == ("answer \n", "jaxllm: error: no more\n")
    with pytest.raises(VLLMValidationError, match="too long"):
        hold(monkeypatch, b"bad\nb\n")
    with pytest.raises(KeyboardInterrupt):
        hold(monkeypatch, b"stop\nb\n")
    with pytest.raises(VLLMValidationError, match="UTF-8"):
        hold(monkeypatch, b"\xff\n")


def test_a_terminal_goes_on_after_errors_and_what_was_said_is_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Standard output is none, so that the mark goes to standard error."""
    model, status = hold(monkeypatch, b"fail\nbad\nstop\n \nb\n", is_terminal=True)
    assert status == 0
    partial = [("assistant", "answer ")]
    asked = [("user", "fail"), *partial, ("user", "bad"), *partial, ("user", "stop"), *partial, ("user", "b")]
    assert model.asked[-1] == asked
    shown = capsys.readouterr()
    assert shown.out == "answer \nanswer \nanswer \nanswer 7\n"
    assert shown.err.count(MARK) == 6
    assert "jaxllm: error: no more\n" in shown.err
    assert "jaxllm: error: too long\n" in shown.err


def test_pictures_go_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A file that is missing, or that is no picture, goes with none, and the talk goes on."""
    (tmp_path / "a.png").write_bytes(b"a picture")
    (tmp_path / "a.txt").write_bytes(b"a text")
    url = "data:image/png;base64,YSBwaWN0dXJl"
    lines = [f"/image {tmp_path}/{name}" for name in ("none.png", "a.txt", "a.png")]
    model, status = hold(monkeypatch, "\n".join(["x", *lines, "y", "z"]).encode(), is_terminal=True, pictures=["first"])
    assert status == 0

    def shown(url: str, text: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]

    said = [content for role, content in model.asked[-1] if role == "user"]
    assert said == [shown("first", "x"), shown(url, "y"), "z"]
    told = capsys.readouterr().err
    assert "none.png cannot be read: No such file or directory." in told
    assert "a.txt is no picture by its name." in told
    assert "a.png goes with the next message." in told
    model, _ = hold(monkeypatch, b"/image a.png\n")
    assert model.asked == [[("user", "/image a.png")]], "a pipe has messages alone"


def test_without_standard_output_there_is_no_talk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(VLLMValidationError, match="standard output is closed"):
        hold(monkeypatch, b"a\n")

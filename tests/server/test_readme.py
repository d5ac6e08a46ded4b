"""The README's requests to a server, by command line and openai's client, work as printed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.architecture.sources import ROOT
from tests.server.support import Served, mock_served

PASSAGE = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Serve it\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    """Return a server with the name that README's has."""
    [name] = re.findall(r"--served-model-name (\S+)", PASSAGE)
    with mock_served(tokenizer, "--served-model-name", name) as server:
        yield server


def test_it_is_fifteen_lines():
    blocks = re.findall(r"```\w+\n(.*?)```", PASSAGE, re.DOTALL)
    assert len([line for block in blocks for line in block.splitlines() if line]) <= 15


def test_curl_gets_an_answer(server: Served):
    [command] = re.findall(r"^curl (?:.*\\\n)*.*", PASSAGE, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    address, flags = words[1], dict(zip(words[2::2], words[3::2], strict=True))
    assert flags.keys() == {"-H", "-d"}
    name, _, value = flags["-H"].partition(": ")
    url = urlsplit(f"http://{address}")
    assert url.port == 8000
    answer = server.post(url.path, flags["-d"].encode(), {name: value})
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"]


def test_openai_s_client_gets_a_stream(server: Served):
    [program] = [block for block in re.findall(r"```python\n(.*?)```", PASSAGE, re.DOTALL) if "import OpenAI" in block]
    tree = ast.parse(program)
    [messages] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node.targets[0]) == "messages"
    ]
    [call] = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "create"]
    body: dict[str, Any] = {
        str(each.arg): ast.literal_eval(messages if _name(each.value) == "messages" else each.value)
        for each in call.keywords
    }
    [base] = re.findall(r'base_url="http://localhost:8000(/[^"]*)"', program)
    answer = server.post(f"{base}/{_path(call.func)}", json.dumps(body).encode(), {"content-type": "application/json"})
    assert answer.status == 200
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events)


def _name(node: ast.AST) -> str:
    """Return the last part of a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _path(node: ast.AST) -> str:
    """Return the path that a method of the client posts to: chat/completions of client.chat.completions.create."""
    return "/".join(ast.unparse(node).split(".")[1:-1])

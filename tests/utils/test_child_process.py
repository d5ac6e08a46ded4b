"""A child process gets its request, sends lines while it works, and ends with the block that started it."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from jaxllm.utils import child_process

ECHO = """
import json, sys, time
question = json.load(sys.stdin)
print(json.dumps(question["request"]), flush=True)
time.sleep(60)
"""


def test_a_child_tells_on_the_way_and_is_killed_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "python_command", lambda module: [sys.executable, "-c", module])
    with child_process.started(ECHO, {"number": 3}, {}) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"number": 3}
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL


def test_a_child_that_ends_before_it_has_read_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "python_command", lambda module: [sys.executable, "-c", module])
    with pytest.raises(child_process.ChildError, match="ended with status 7"):
        child_process.ask("import os; os._exit(7)", "x" * 2**20, str, {})

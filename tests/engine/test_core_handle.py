"""The process of a core: it gets what can be sent, a start that fails leaves nothing, and nobody waits for a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from jaxllm.engine.client import core_handle
from jaxllm.engine.client.core_handle import CoreProcess
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.transport.sockets import FrontSockets, Meeting
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils import child_process

ARGS, USE = EngineArgs(model="nobody's"), UsageContext.LLM_CLASS
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the folders of sockets are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_stays(temporary: Path) -> Iterator[None]:
    """Check that no process, no folder and no file descriptor is left of a test."""
    here = psutil.Process()
    num_fds, children = here.num_fds(), here.children()
    yield
    assert set(here.children()) <= set(children)
    assert not list(temporary.glob("jaxllm-*"))
    assert here.num_fds() <= num_fds


def test_what_python_would_skip_in_sys_path_is_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    keep = f"import sys; open({str(path)!r}, 'wb').write(sys.stdin.buffer.read())"
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, "/no\udcff/unicode", "/plain"])
    process = CoreProcess(ARGS, USE, [sys.executable, "-c", keep])
    process.stop(20)
    order = json.loads(path.read_bytes())
    assert order["sys_path"] == [*sys.path[:-3], "/plain"]
    assert order["front_pid"] == os.getpid()
    assert order["folder"] == str(process.meeting.folder)


def test_a_start_that_is_interrupted_while_it_hands_over_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(pid: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pidfd_open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        CoreProcess(ARGS, USE, SLEEP)


def test_sockets_that_cannot_be_bound_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, address: str) -> None:
        raise zmq.ZMQError(36, "File name too long")

    monkeypatch.setattr(zmq.Socket, "bind", refuse)
    with pytest.raises(zmq.ZMQError, match="too long"):
        RemoteCore.in_process(ARGS, USE, SLEEP)


def test_a_wrong_timeout_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_STEP_TIMEOUT", "soon")
    with pytest.raises(VLLMValidationError, match="JAXLLM_STEP_TIMEOUT"):
        RemoteCore.in_process(ARGS, USE, SLEEP)
    with pytest.raises(VLLMValidationError, match="JAXLLM_STEP_TIMEOUT"):
        RemoteCore.in_thread(lambda on_tokenizer: pytest.fail("nothing is to be started"))


@pytest.mark.parametrize("name", ["x" * 100, "no\udcff"])
def test_a_temporary_folder_that_sockets_cannot_be_in_is_not_used(
    name: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = temporary / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    meeting = Meeting.on_host()
    assert meeting.folder is not None
    assert meeting.folder.parent == Path("/tmp")
    with zmq.Context() as context:
        FrontSockets(context, meeting).close()
    meeting.close()
    assert not meeting.folder.exists()


def test_a_system_without_process_descriptors_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    remote = RemoteCore.in_process(ARGS, USE, [sys.executable, "-c", "raise SystemExit(3)"])
    assert remote.handle.fds == []
    with pytest.raises(EngineDeadError, match="ended with status 3"):
        remote.wait_ready()
    remote.shutdown()


def test_nobody_waits_until_a_process_has_read_its_order() -> None:
    """A pipe is full after 64 KiB, and the process here reads nothing."""
    order = EngineArgs(model="m", hf_overrides={"long": "x" * 300_000})
    process = CoreProcess(order, USE, [sys.executable, "-c", "import time; time.sleep(2)"])
    assert process.end_reason() is None
    process.stop(0)


@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGKILL, "SIGKILL; the system"), (signal.SIGRTMIN + 2, "signal 36")]
)
def test_the_signal_that_ended_a_process_is_named(number: int, text: str) -> None:
    process = CoreProcess(ARGS, USE, SLEEP)
    os.kill(process.pid, number)
    process.wait(20)
    assert text in (process.end_reason() or "")
    process.stop(0)


def test_nobody_waits_for_a_process_that_a_driver_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill` returns at once, and `wait` after a while."""
    process = CoreProcess(ARGS, USE, SLEEP)
    monkeypatch.setattr(core_handle, "KILLED_SECONDS", 0.05)
    kill = process._process.kill
    monkeypatch.setattr(process._process, "kill", lambda: None)  # as if it did not end
    started = time.monotonic()
    process.kill()
    process.wait(0.01)
    assert time.monotonic() - started < 5
    assert process.end_reason() is None
    kill()
    process.stop(20)


def test_a_start_says_what_it_is_at(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("jaxllm.engine.client.remote_core.REPORT_SECONDS", 0.1)
    caplog.set_level("INFO")
    remote = RemoteCore.in_process(ARGS, USE, [sys.executable, "-c", "import time; time.sleep(1.2)"])
    with pytest.raises(EngineDeadError, match="status 0"):
        remote.wait_ready()
    remote.shutdown()
    assert "is still starting: it imports its modules" in caplog.text


def test_a_front_end_that_is_killed_while_the_core_starts_leaves_no_folder(temporary: Path) -> None:
    core = """
import time
from jaxllm.engine.core import core_process
def run_core(start, addresses, context):
    print("watched", flush=True)
    time.sleep(600)
core_process.run_core = run_core
core_process.serve(None)
"""
    front = """
import sys
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.engine.client.core_handle import CoreProcess
process = CoreProcess(EngineArgs(model="m"), "LLM_CLASS", [sys.executable, "-c", sys.argv[1]])
print(process.pid, flush=True)
process.wait(600)
"""
    command = [sys.executable, "-c", front, core]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "watched\n"
        assert list(temporary.glob("jaxllm-*"))
        process.kill()
    wait_end(pid)


def wait_end(pid: int, seconds: float = 10) -> None:
    """Wait until a process that is no child has ended."""
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_core_gets_the_flags_of_python() -> None:
    say = """
import subprocess, sys
from jaxllm.utils.child_process import python_command
print(subprocess.run([*python_command("platform")[:-2], "-c", sys.argv[1]], capture_output=True).stdout.decode())
"""
    flags = "import sys; print([sys.flags.optimize, sys.flags.no_user_site, sys.flags.safe_path, sys.warnoptions])"
    command = [sys.executable, "-O", "-s", "-W", "ignore::ResourceWarning", "-c", say, flags]
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert said.strip() == "[1, 1, True, ['ignore::ResourceWarning']]"
    assert child_process.python_command("m")[-3:] == ["-P", "-m", "m"]

"""A process that was started for another one ends with it, on systems that tell of an end and on others."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:], str(os.getpid())])
print(child.pid, flush=True)
if sys.argv[2] != "dead":
    time.sleep(60)
"""

CHILD = """
import os, sys, time
from pathlib import Path
from jaxllm.utils import fork_safety as forks

how, folder, told = sys.argv[1], sys.argv[2], int(sys.argv[3])
if how == "no descriptors":
    def refuse(pid):
        raise OSError("not implemented")
    os.pidfd_open = refuse
if how == "dead":
    while os.getppid() == told:  # as if imports had taken so long
        time.sleep(0.01)
forks.end_with(told, lambda: Path(folder, "last").write_text("called"))
Path(folder, "watching").touch()
while True:
    pass
"""


@pytest.mark.parametrize("how", ["descriptor", "no descriptors", "dead"])
def test_a_busy_process_ends_with_its_parent(how: str, tmp_path: Path) -> None:
    """Also one whose parent has ended before it looks: another process is its parent then."""
    command = [sys.executable, "-c", PARENT, CHILD, how, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if how != "dead":
            deadline = time.monotonic() + 20
            while not (tmp_path / "watching").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert child.is_running()
        parent.kill()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:  # where nobody asks for its status
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "last").read_text() == "called"

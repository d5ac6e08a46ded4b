"""A log on a pipe that nobody reads holds nothing up; what is dropped is counted, and the rest keeps its order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import logging, sys, time
from jaxllm.utils.log import show_log

show_log()
logger = logging.getLogger("jaxllm")
started = time.monotonic()
for number in range(4000):
    logger.info("line %d %s", number, "x" * 1000)
print(time.monotonic() - started, flush=True)
sys.stdin.readline()
time.sleep(0.5)
logger.info("the last one")
"""


def test_a_pipe_that_nobody_reads() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert float(process.stdout.readline()) < 10
        process.stdin.write("read now\n")
        process.stdin.close()
        lines = process.stderr.read().splitlines()
        assert process.wait(10) == 0
    numbers = [int(match.group(1)) for line in lines if (match := re.search(r" INFO line (\d+) x", line))]
    dropped = [int(match.group(1)) for line in lines if (match := re.search(r" WARNING (\d+) lines of", line))]
    assert numbers[:900] == list(range(900)), "the first ones"
    assert numbers == sorted(set(numbers)), "in their order"
    assert len(numbers) >= 1000
    assert dropped
    assert len(numbers) + sum(dropped) == 4000
    assert lines[-1].endswith(" INFO the last one")


def test_a_program_without_stderr_logs_nowhere() -> None:
    program = """
import logging, sys
assert sys.stderr is None
from jaxllm.utils.log import show_log
show_log()
logging.getLogger("jaxllm").info("nobody hears it")
print("done")
"""
    command = 'exec "$0" -c "$1" 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "done\n"


def test_a_process_ends_though_nobody_reads() -> None:
    program = PROGRAM.replace("sys.stdin.readline()", "").replace("time.sleep(0.5)", "")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        started = time.monotonic()
        assert process.wait(30) == 0
        assert time.monotonic() - started < 20


def test_the_documented_log_of_json(tmp_path: Path, repository: Path) -> None:
    page = (repository / "docs" / "operations.md").read_text()
    file = tmp_path / "log.json"
    file.write_text(next(part for part in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if "formatters" in part))
    program = """
import logging, sys
from jaxllm.utils.log import configure_log
configure_log(sys.argv[1])
logging.getLogger("uvicorn.access").info('%s - "%s"', "host", "GET /")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("jaxllm.a").exception("it failed")
"""
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    access, failure = map(json.loads, done.stderr.splitlines())
    assert (access["level"], access["logger"], access["message"]) == ("INFO", "uvicorn.access", 'host - "GET /"')
    assert "ZeroDivisionError" in failure["exception"]

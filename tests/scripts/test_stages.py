"""scripts/lib/stages.sh: time limits, repeated processes, and what a failure stops."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.scripts

PLAN = """
plan() {
  stop_on_failure=1
  stage first 60
  run one 30 child.py one
  run two 30 child.py two
  stop_on_failure=
  stage second 60 first
  run three 2 child.py three
  run four 30 child.py four
  stage third 60
  run five 30 child.py five
}
"""
CHILD = """
import pathlib, sys, time
name, path = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
with open("ran", "a") as ran:
    print(name, file=ran)
path.write_text('{"complete": false}')
if pathlib.Path(f"{name}.hangs").exists():
    time.sleep(60)
if pathlib.Path(f"{name}.fails").exists():
    sys.exit("no good")
path.write_text('{"complete": true}')
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "child.py").write_text(CHILD)
    return tmp_path


def follow(folder: Path, repository: Path, *options: str, plan: str = PLAN) -> subprocess.CompletedProcess[str]:
    script = f". {repository}/scripts/lib.sh; . {repository}/scripts/lib/stages.sh; GRACE=1\n{plan}\nfollow_plan gpu "
    return subprocess.run(
        ["bash", "-uo", "pipefail", "-c", script + '"$@"', "plan", *options],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OUT": str(folder / "out")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ran(folder: Path) -> list[str]:
    """Return the processes that ran since the last call."""
    path = folder / "ran"
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def test_all_stages_run_in_order(folder: Path, repository: Path) -> None:
    done = follow(folder, repository)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran(folder) == ["one", "two", "three", "four", "five"]
    assert json.loads((folder / "out/second/four.json").read_text()) == {"complete": True}
    assert (folder / "out/second/four.log").exists()


def test_a_failure_stops_what_depends_on_it_and_no_more(folder: Path, repository: Path) -> None:
    (folder / "one.fails").touch()
    done = follow(folder, repository)
    assert done.returncode == 1
    assert ran(folder) == ["one", "five"]
    assert "no good" in done.stdout
    assert "failed: first/one: exit status 1" in done.stdout
    assert "second is not run: it needs first, where one failed" in done.stdout
    assert follow(folder, repository, "--stage", "second").returncode == 1, "another call knows it too"
    assert ran(folder) == []


def test_only_what_is_complete_is_left_out(folder: Path, repository: Path) -> None:
    (folder / "four.fails").touch()
    assert follow(folder, repository).returncode == 1
    assert ran(folder) == ["one", "two", "three", "four", "five"]
    (folder / "four.fails").unlink()
    (folder / "out/third/five.json").write_text("")
    assert follow(folder, repository, "--resume").returncode == 0
    assert ran(folder) == ["four", "five"]
    assert follow(folder, repository, "--stage", "second").returncode == 0, "without --resume all of it runs again"
    assert ran(folder) == ["three", "four"]


def test_what_hangs_is_killed_and_named(folder: Path, repository: Path) -> None:
    (folder / "three.hangs").touch()
    done = follow(folder, repository)
    assert done.returncode == 1
    assert "failed: second/three: killed after 2 s" in done.stdout
    assert ran(folder) == ["one", "two", "three", "four", "five"]


def test_a_stage_ends_when_its_time_is_over(folder: Path, repository: Path) -> None:
    (folder / "three.hangs").touch()
    plan = PLAN.replace("stage second 60", "stage second 3").replace("run three 2", "run three 30")
    done = follow(folder, repository, plan=plan)
    assert re.search(r"failed: second/three: killed after [12] s", done.stdout)
    assert "failed: second/four: the stage's time is over" in done.stdout
    assert ran(folder) == ["one", "two", "three", "five"]


def test_wrong_arguments_run_nothing(folder: Path, repository: Path) -> None:
    for options in (["--stage", "fourth"], ["--fast"]):
        done = follow(folder, repository, *options)
        assert done.returncode == 1
        assert done.stderr.startswith("jaxllm: ")
    assert ran(folder) == []


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_the_plan_takes_45_minutes_in_calls_of_ten(name: str, repository: Path) -> None:
    said = subprocess.run(
        [f"scripts/{name}_check.sh", "--plan"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    stages = {stage: int(seconds) for stage, seconds in re.findall(r"^(\w+) .*, (\d+) s", said, re.MULTILINE)}
    calls = [line.partition("--stage")[2].split() for line in said.splitlines() if "--stage" in line]
    assert [stage for call in calls for stage in call] == list(stages)
    assert all(sum(stages[stage] for stage in call) <= 600 for call in calls)
    assert sum(stages.values()) <= 2700
    scripts = re.findall(r"^    [\w.-]+ +(\d+) s +(\S+)", said, re.MULTILINE)
    assert len(scripts) > 10
    assert all((repository / script).is_file() for _, script in scripts)
    assert max(int(seconds) for seconds, _ in scripts) <= 600


def test_each_process_fits_its_stage(repository: Path) -> None:
    for name in ("gpu", "tpu"):
        limit = 0
        for line in (repository / f"scripts/{name}_check.sh").read_text().splitlines():
            words = line.split()
            if words[:1] == ["stage"]:
                limit = int(words[2])
            elif words[:1] == ["run"]:
                assert int(words[2]) < limit, line

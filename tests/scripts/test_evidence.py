"""scripts/lib: what evidence is written, how machine.py describes the machine, and the times of the profiler."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from lib import device_time, machine
from lib.device_time import Operation, busy_seconds, microseconds_by_name, read_operations, time_calls
from lib.evidence import Evidence
from lib.machine import describe_device

pytestmark = [
    pytest.mark.scripts,
    pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning"),
]


def read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def test_rows_are_on_disk_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where.json"
    evidence = Evidence(path, {"device": "cpu"})
    evidence.add({"us": 1})
    assert read(path) == {"device": "cpu", "complete": False, "rows": [{"us": 1}]}
    assert evidence.finish() == 0
    assert read(path)["complete"] is True


def test_a_row_that_missed_is_no_complete_evidence(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    evidence = Evidence(path, {})
    evidence.add({"missed": []})
    evidence.add({"missed": ["the pool differs"]})
    assert evidence.finish() == 1
    assert read(path)["complete"] is False
    assert Evidence(path, {}).finish() == 1, "nor is no row at all"
    assert Evidence(path, {}).skip("torch not installed") == 0
    assert read(path) == {"complete": True, "rows": [], "skipped": "torch not installed"}


def test_a_cpu_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = describe_device()
    assert (facts["device"], facts["gpu"], facts["ptxas_doubt"]) == ("cpu", None, None)
    assert facts["num_devices"] == len(jax.devices())
    assert facts["versions"]["jax"] == jax.__version__
    assert "jaxlib" in facts["versions"]
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "REVISION", tmp_path / "REVISION")
    assert machine.find_revision() is None
    (tmp_path / "REVISION").write_text("0123456789ab\n")
    assert machine.find_revision() == "0123456789ab"


def test_the_first_ptxas_of_the_path_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.find_ptxas() is None
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.3, V13.3.20'\n")
    program.chmod(0o755)
    assert machine.find_ptxas() == {"path": str(program), "release": "13.3.20"}
    monkeypatch.setattr(machine, "ROOT", tmp_path.parent)
    assert machine.find_ptxas() == {"path": f"./{tmp_path.name}/ptxas", "release": "13.3.20"}


def test_time_is_counted_once_where_operations_overlap() -> None:
    operations = [
        Operation("b", 2.0, 3.0),
        Operation("a", 1.0, 2.0),
        Operation("a", 7.0, 1.0),
        Operation("c", 2.5, 0.1),
    ]
    assert busy_seconds(operations) == pytest.approx(5.0)
    assert microseconds_by_name(operations, 2) == {"a": 1.5e6, "b": 1.5e6, "c": 0.05e6}
    assert busy_seconds([]) == 0


def test_a_profile_of_a_cpu_is_read(tmp_path: Path) -> None:
    function = jax.jit(lambda a: jnp.sort(a @ a, axis=0))
    a = jax.random.normal(jax.random.key(0), (300, 300))
    jax.block_until_ready(function(a))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            jax.block_until_ready(function(a))
    operations = list(read_operations(tmp_path))
    sorts = [each for each in operations if "sort" in each.name]
    assert len(sorts) == 3
    assert all(each.seconds > 0 for each in sorts)
    assert 0 < busy_seconds(sorts) <= busy_seconds(operations)


def test_the_wall_clock_counts_where_the_profiler_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    function = jax.jit(lambda a: a @ a)
    a = jax.random.normal(jax.random.key(0), (400, 400))
    timing = time_calls(lambda: [function(a) for _ in range(2)], calls=2, repeats=3)
    assert timing.clock == "profiler"
    assert timing.seconds > 0
    assert timing.operations
    monkeypatch.setattr(device_time, "profile", lambda run: [])
    timing = time_calls(lambda: function(a), repeats=1)
    assert (timing.clock, timing.seconds, timing.operations) == ("wall clock", timing.wall_seconds, {})

"""scripts/bench.py stalled: misbehaving clients behave as named, and the figures are of the others."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from bench import stalled as bench_stalled
from lib.servers import Streamed

from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder

pytestmark = pytest.mark.scripts


def test_all_of_it_runs(tmp_path: Path, repository: Path) -> None:
    out = tmp_path / "stalled.json"
    command = [sys.executable, str(repository / "scripts" / "bench.py"), "stalled", "--quick", "--json", str(out)]
    command += ["--model", str(folder("llama3_tied")), "--tokenizer", save_tokenizer(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())["mock"]
    assert [row["beside"] for row in record["rows"]] == list(bench_stalled.KINDS)
    assert all(row["itl_ms"]["p50"] > 0 for row in record["rows"])
    assert record["goals_reached"].keys() == {"stalled", "slow", "half_open"}


def test_a_client_that_is_gone_acknowledges_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            server.sendall(b"a")
            assert client.recv(1) == b"a"
            bench_stalled.vanish(client)
            server.sendall(b"b")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_rows_are_ratios_to_the_same_round() -> None:
    steps = {"nobody": 0.1, "reading": 0.1, "stalled": 0.1, "slow": 0.12, "half_open": 0.3}

    async def run(kind: str) -> list[Streamed]:
        return [Streamed(0.0, [steps[kind] * i for i in range(1, 5)])]

    rows = bench_stalled.measure(run, 3)
    assert {row["beside"]: row["ratio"] for row in rows} == {
        "nobody": 1.0,
        "reading": 1.0,
        "stalled": 1.0,
        "slow": 1.2,
        "half_open": 3.0,
    }
    assert bench_stalled.verdicts(rows) == {"stalled": True, "slow": False, "half_open": False}
    assert asyncio.run(run("slow"))[0].arrivals

"""One model over several hosts, here processes: the same tokens as in one, and no process outlives a lost host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_tensor_parallel import LLAMA, write_checkpoint
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.quick import QUICK_FLAGS
from tests.slurm import slurm_variables

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

END_SECONDS = 10
STATUSES = (1, -signal.SIGABRT)
"""The exit statuses of a process that has lost a host; JAX aborts one whose first host is gone, if it is quicker."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(
    case: str,
    num_hosts: int,
    devices: int,
    out: Path,
    repository: Path,
    files: Sequence[str] = (),
    *,
    has_slurm: bool = False,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of a case, and kill at the end those that still run."""
    port = free_port()
    environment = os.environ | {
        "XLA_FLAGS": QUICK_FLAGS,
        "PYTHONPATH": f"{repository}{os.pathsep}{repository / 'scripts'}",
    }
    processes = []
    try:
        for rank in range(num_hosts):
            variables = environment | (slurm_variables(num_hosts, rank, "127.0.0.1") if has_slurm else {})
            arguments = [case, num_hosts, devices, "auto" if has_slurm else rank, port, out, *files]
            command = [sys.executable, "-m", "tests.e2e.host_runs", *map(str, arguments)]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, cwd=repository, env=variables, **streams))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def run(
    case: str, num_hosts: int, devices: int, out: Path, repository: Path, files: Sequence[str] = (), **options: bool
) -> Any:
    """Return the results of a case; all processes have to exit with 0."""
    with started(case, num_hosts, devices, out, repository, files, **options) as processes:
        said = [process.communicate()[0] for process in processes]
        statuses = [process.returncode for process in processes]
        assert statuses == [0] * num_hosts, "\n".join(each[-3000:] for each in said)
    return json.loads(out.read_text())


@pytest.mark.parametrize(("num_hosts", "devices"), [(2, 1), (2, 2), (4, 1)])
def test_every_sampling_feature_gives_what_one_process_gives(
    tmp_path: Path, repository: Path, num_hosts: int, devices: int
) -> None:
    files = [str(write_checkpoint(tmp_path / "llama", LLAMA)), save_tokenizer(tmp_path / "tokenizer")]
    expected = run("features", 1, num_hosts * devices, tmp_path / "one.json", repository, files)
    got = run("features", num_hosts, devices, tmp_path / "many.json", repository, files)
    assert (got["num_preemptions"] > 0, got["most_chunks"] > 1, got["cached"] > 0) == (True, True, True)
    assert len(expected["outputs"]) == len(got["outputs"]) > 7
    for left, right in zip(expected["outputs"], got["outputs"], strict=True):
        for name in ("token_ids", "ended", "text"):
            assert [each[name] for each in left["outputs"]] == [each[name] for each in right["outputs"]]


@pytest.mark.parametrize("case", ["adapters", "head", "pooled"])
def test_other_steps_give_what_one_process_gives(tmp_path: Path, repository: Path, case: str) -> None:
    expected = run(case, 1, 2, tmp_path / "one.json", repository)
    assert run(case, 2, 1, tmp_path / "two.json", repository) == expected


def test_prompts_of_embeddings_give_hf_tokens(tmp_path: Path, repository: Path) -> None:
    output = run("embeds", 2, 1, tmp_path / "two.json", repository)
    assert output["got"] == output["expected"]
    assert output["is_same"]


def test_prompts_with_pictures_give_hf_tokens(tmp_path: Path, repository: Path) -> None:
    outputs = run("pictures", 2, 1, tmp_path / "two.json", repository)
    assert len(outputs) == 3
    for got, expected in outputs:
        assert got == expected


def test_hosts_that_slurm_has_started_find_each_other(tmp_path: Path, repository: Path) -> None:
    expected = run("adapters", 1, 2, tmp_path / "one.json", repository)
    assert run("adapters", 2, 1, tmp_path / "two.json", repository, has_slurm=True) == expected


@pytest.mark.parametrize(("killed", "name"), [(1, "host 1"), (0, "host 0")])
def test_when_a_host_is_lost_all_end_and_say_which(tmp_path: Path, repository: Path, killed: int, name: str) -> None:
    with started("for_ever", 2, 1, tmp_path / "none.json", repository) as processes:
        first = processes[0].stdout
        assert first is not None
        while (line := first.readline()) != "runs\n":
            assert line, "the engine has not come up"
        time.sleep(0.5)
        processes[killed].send_signal(signal.SIGKILL)
        other, began = processes[1 - killed], time.monotonic()
        said, _ = other.communicate(timeout=END_SECONDS)
        assert time.monotonic() - began < END_SECONDS
        assert other.returncode in STATUSES
        assert name in said
        assert "lost" in said


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "node_rank"),
        ({"node_rank": 1}, "node_rank"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "nnodes"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "nnodes"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_is_waited_for(changes: dict[str, Any], parameter: str) -> None:
    from jaxllm.engine.core.hosts.join import join
    from jaxllm.exceptions import VLLMValidationError
    from jaxllm.resolve.engine_args import EngineArgs

    with pytest.raises(VLLMValidationError) as caught:
        join(EngineArgs(model="none", **changes))
    assert caught.value.parameter == parameter

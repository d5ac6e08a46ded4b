"""nnodes="auto" becomes what the environment says, as JAX reads it, or is refused with the way out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.discovery import on_this_host
from jaxllm.resolve.engine_args import EngineArgs
from tests.slurm import slurm_variables

SLURM = slurm_variables(4, 2, "node[003-006],other")
CLUSTERS = ("SLURM_", "OMPI_", "KUBERNETES_", "TPU_", "MEGASCALE_")

type SetEnvironment = Callable[[Mapping[str, str]], None]


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> SetEnvironment:
    """Return a function that makes some variables the only ones that a cluster has set."""

    def set_all(variables: Mapping[str, str]) -> None:
        for name in [name for name in os.environ if name.startswith(CLUSTERS)]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def place(args: EngineArgs) -> tuple[int, int, str, int]:
    return args.nnodes, args.node_rank, args.master_addr, args.master_port


def test_slurm_names_the_hosts(set_environment: SetEnvironment):
    set_environment(SLURM)
    args = AsyncEngineArgs(model="m", nnodes="auto", tensor_parallel_size=16, max_num_queued_reqs=3)  # type: ignore[arg-type]
    discovered = on_this_host(args)
    assert place(discovered) == (4, 2, "node003", 29501)
    assert (type(discovered), discovered.tensor_parallel_size, discovered.max_num_queued_reqs) == (
        AsyncEngineArgs,
        16,
        3,
    )
    assert discovered.portable()["nnodes"] == 4
    assert on_this_host(discovered) is discovered


def test_numbers_that_are_given_stay(set_environment: SetEnvironment):
    set_environment(SLURM)
    args = EngineArgs(model="m", nnodes=3, node_rank=1, master_addr="a")
    assert on_this_host(args) is args


def test_a_cluster_of_one_is_none(set_environment: SetEnvironment):
    set_environment(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert on_this_host(EngineArgs(model="m", nnodes=0)) == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("variables", "fields", "parameter", "message"),
    [
        ({}, {}, "nnodes", "a step of Slurm.*give nnodes, node_rank and master_addr"),
        (SLURM | {"SLURM_PROCID": "x"}, {}, "nnodes", "failed .*ValueError: .*give nnodes, node_rank and master_addr"),
        (SLURM | {"SLURM_LOCALID": "3"}, {}, "nnodes", "process 3 of its host.*one process on each"),
        (SLURM, {"node_rank": 2}, "node_rank", "node_rank=2 .*leave it out"),
        (SLURM, {"master_addr": "node003"}, "master_addr", "'node003' .*leave it out"),
    ],
)
def test_what_cannot_be_found_is_refused(
    set_environment: SetEnvironment,
    variables: Mapping[str, str],
    fields: dict[str, Any],
    parameter: str,
    message: str,
):
    set_environment(variables)
    args = EngineArgs(model="no/such-model", nnodes=0, **fields)
    for begin in (on_this_host, LLMEngine.from_engine_args, EngineArgs.create_engine_config):
        with pytest.raises(VLLMValidationError, match=message) as refused:
            begin(args)
        assert refused.value.parameter == parameter

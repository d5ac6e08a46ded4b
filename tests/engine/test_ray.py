"""Ray is missing in most environments; what it cannot start is refused before it is imported.

scripts/check.py replicas and ray_hosts run cores and hosts as its actors.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.front.start import follow_if_not_first, uses_ray
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "leave node_rank and master_addr out"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "nnodes=2 does not divide tensor_parallel_size=3"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "replicas of a model over several hosts"),
    ],
)
def test_hosts_that_ray_cannot_start_are_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(VLLMValidationError, match=message):
        uses_ray(EngineArgs(model="any", distributed_executor_backend="ray", **changes))


def test_a_later_host_does_not_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    args = EngineArgs(model="any", distributed_executor_backend="ray", nnodes=2, tensor_parallel_size=2, node_rank=1)
    with pytest.raises(VLLMValidationError, match="Ray starts all hosts"):
        follow_if_not_first(args)


def test_ray_starts_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="any", distributed_executor_backend="ray", nnodes=2, tensor_parallel_size=4)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(VLLMValidationError, match=r"pip install 'jaxllm\[ray\]'"):
        uses_ray(args)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert uses_ray(args)
    assert not uses_ray(EngineArgs(model="any", nnodes=2, tensor_parallel_size=4))

"""Ray is missing in most environments; what it cannot start is refused before it is imported.

scripts/check.py replicas and ray_hosts run cores and hosts as its actors.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxllm.engine.front.start import follow_if_not_first, uses_ray
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.usage.usage_lib import UsageContext
from tests.models.tiny import folder

CORE_ACTOR = "jaxllm.engine.client.core_actor"


class FakeRay(ModuleType):
    """Ray as far as the front end's side of an actor calls it: a call's result is its number."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.calls: dict[str, list[int]] = {}
        self.results: dict[int, Any] = {}
        self._numbers = itertools.count()

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8, "GPU": 4}

    def remote(self, _: type) -> Any:
        actor = SimpleNamespace(**{name: self._method(name) for name in ("place", "address", "run")})
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))

    def _method(self, name: str) -> Any:
        def call(*_: object) -> int:
            self.calls.setdefault(name, []).append(number := next(self._numbers))
            return number

        return SimpleNamespace(remote=call)

    def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        ended = [call for call in calls if call in self.results][:num_returns]
        return ended, [call for call in calls if call not in ended]

    def get(self, call: int) -> Any:
        if isinstance(result := self.results[call], Exception):
            raise result
        return result


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Return what stands in for Ray."""
    made = FakeRay()
    names = {
        "ray.exceptions": {"GetTimeoutError": TimeoutError, "RayError": ConnectionError},
        "ray.util.placement_group": {"placement_group": lambda *_, **__: "a group", "remove_placement_group": id},
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_, **__: None},
    }
    monkeypatch.setitem(sys.modules, "ray", made)
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, CORE_ACTOR, raising=False)
    yield made
    sys.modules.pop(CORE_ACTOR, None)


def make_actors(num_hosts: int) -> Any:
    """Return the handle of a core on some hosts with two GPUs each."""
    actor = importlib.import_module(CORE_ACTOR).CoreActor
    args = EngineArgs(model=str(folder("qwen3")), nnodes=num_hosts, tensor_parallel_size=2 * num_hosts)
    handle = actor(args, UsageContext.OPENAI_API_SERVER)
    handle.poll_seconds = 0.0
    return handle


@pytest.mark.parametrize(
    ("rank", "result", "reason"),
    [
        (0, 0, "it ended with status 0"),
        (0, ConnectionError("lost\nby a node"), "it has ended; Ray says: lost"),
        (1, 1, "host 1 of 3 (a Ray actor) ended with status 1"),
        (2, ConnectionError("lost"), "host 2 of 3 (a Ray actor) has ended; Ray says: lost"),
    ],
)
def test_the_reason_names_the_host(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, rank: int, result: Any, reason: str
) -> None:
    handle = make_actors(3)
    monkeypatch.setattr(f"{CORE_ACTOR}._BLAME_SECONDS", 0.0)
    assert handle.end_reason() is None
    ray.results[ray.calls["run"][rank]] = result
    assert handle.end_reason() == reason


def test_the_core_is_the_reason_where_others_fail_with_it(ray: FakeRay) -> None:
    handle = make_actors(3)
    first, *others = ray.calls["run"]
    ray.results |= dict.fromkeys(others, 1)
    assert handle.end_reason() is None
    ray.results[first] = ConnectionError("killed")
    assert handle.end_reason() == "it has ended; Ray says: killed"


def test_a_host_that_ends_well_is_not_the_end_of_the_core(ray: FakeRay) -> None:
    handle = make_actors(3)
    first, *others = ray.calls["run"]
    ray.results |= dict.fromkeys(others, 0)
    assert handle.end_reason() is None
    ray.results[first] = 3
    assert handle.end_reason() == "it ended with status 3"


@pytest.mark.parametrize(
    ("num_hosts", "num_started", "warning"),
    [
        (2, 1, "started 1 of 2 actors of {core} in 30 s: it waits for 2 machines with 2 GPU free on each"),
        (1, 0, "started 0 of 1 actors of {core} in 30 s: it waits for 1 machine with 2 GPU free"),
        (2, 2, None),
    ],
)
def test_one_warning_says_what_ray_waits_for(
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_hosts: int,
    num_started: int,
    warning: str | None,
) -> None:
    handle = make_actors(num_hosts)
    ray.results |= dict.fromkeys(ray.calls["place"][:num_started], ("node", 1))
    with caplog.at_level("WARNING", "jaxllm"):
        handle.end_reason()
        assert not caplog.messages
        handle._patient_until = 0.0  # long ago
        handle.end_reason()
        handle.end_reason()
    assert caplog.messages == ([] if warning is None else ["Ray has " + warning.format(core=handle.name)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "chooses node_rank: start one program"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "10.0.0.1"}, "chooses master_addr: .* leave them out"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_port": 7000}, "chooses master_port: .* nnodes as a number"),
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
        follow_if_not_first(args, UsageContext.LLM_CLASS)


def test_ray_starts_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="any", distributed_executor_backend="ray", nnodes=2, tensor_parallel_size=4)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(VLLMValidationError, match=r"pip install 'jaxllm\[ray\]'"):
        uses_ray(args)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert uses_ray(args)
    assert not uses_ray(EngineArgs(model="any", nnodes=2, tensor_parallel_size=4))

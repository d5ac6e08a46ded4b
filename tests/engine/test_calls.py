"""The table of the core's calls: which there are, and how the answers of replicas become one."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.client.replicated_core import ReplicatedCore
from jaxllm.engine.transport.core_client import CALLS
from tests.engine.fake_core import BytesClient, FakeCore


@pytest.mark.parametrize(
    ("call", "answers", "gathered"),
    [
        ("num_computed_tokens", [0, 5], 5),  # the replica that has the request is not always the first
        ("reset_prefix_cache", [True, False], False),
        ("add_lora", [True, True], True),
        ("remove_lora", [True, False], True),
        ("list_loras", [[2, 1], [3, 1]], [1, 2, 3]),
        ("pin_lora", [False, True], True),
        ("warm_up", [None, None], None),
    ],
)
def test_answers_of_replicas_become_one(call: str, answers: list[Any], gathered: Any):
    assert CALLS[call].gather(answers) == gathered


def test_clients_and_cores_have_every_call():
    for owner in (FakeCore, InprocClient, ReplicatedCore):
        assert all(callable(getattr(owner, call)) for call in CALLS)


@pytest.mark.parametrize("client", [InprocClient, BytesClient])
def test_calls_take_defaults_and_keywords(client: type[InprocClient | BytesClient]):
    core = client(FakeCore(lambda request: []))
    assert core.reset_prefix_cache()
    assert core.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(TypeError):
        core.remove_lora()  # type: ignore[call-arg]

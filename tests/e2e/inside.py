"""Tests that look at the engine's state reach into an `LLM` with these functions."""

from __future__ import annotations

from jaxllm import LLM
from jaxllm.engine.core import EngineCore
from jaxllm.engine.core_client import InprocClient
from jaxllm.scheduling.scheduler import Scheduler
from tests.engine.fake_core import BytesClient


def core_of(llm: LLM) -> EngineCore:
    """Return the core that runs in this process."""
    client = llm.llm_engine._core
    assert isinstance(client, (InprocClient, BytesClient))
    core = client._core
    assert isinstance(core, EngineCore)
    return core


def scheduler_of(llm: LLM) -> Scheduler:
    """Return the core's scheduler."""
    return core_of(llm)._scheduler

"""Weights load while the largest step is compiled to size the pool, and not before it is known that they may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxllm import EngineArgs
from jaxllm.engine.core import startup
from jaxllm.engine.core.early_load import EarlyLoad, _StoppedError
from jaxllm.engine.core.startup import Prepared, prepare
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.programs.background import Programs
from jaxllm.execution.programs.cache import Folders
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.loading.folder import FolderCheckpoint
from jaxllm.resolve.engine_config import EngineConfig
from tests.models.tiny import folder

LIMIT = 2**28
"""The bytes of a device that this CPU stands in for."""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Return the configuration of an engine that compiles only to size its pool, and keeps nothing."""
    monkeypatch.setattr(startup, "use_cache", lambda *_, **__: Folders(None, None))
    monkeypatch.setattr(startup, "memory_limit", lambda _: LIMIT)
    arguments = EngineArgs(model=str(folder("llama3_tied")), enforce_eager=True, max_num_batched_tokens=64)
    return arguments.create_engine_config()


def sizing(monkeypatch: pytest.MonkeyPatch, compile_largest: Callable[[], int]) -> None:
    """Let `compile_largest` stand in for the compilation that sizing waits for."""
    monkeypatch.setattr(StepCompiler, "used_bytes", lambda _: compile_largest())


def weights_of(prepared: Prepared) -> EarlyLoad:
    assert prepared.weights is not None
    return prepared.weights


def test_weights_load_while_the_pool_is_sized(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    loaded, load = threading.Event(), startup._load

    def show(*arguments: Any) -> Any:
        params = load(*arguments)
        loaded.set()
        return params

    def compile_largest() -> int:
        assert loaded.wait(30), "sizing comes first"
        return LIMIT // 2

    monkeypatch.setattr(startup, "_load", show)
    sizing(monkeypatch, compile_largest)
    prepared = prepare(config)
    params = weights_of(prepared).result()
    expected = load(config, prepared.specs)
    assert jax.tree.all(jax.tree.map(lambda one, other: (one == other).all(), params, expected))
    prepared.stop()


def test_a_refusal_ends_the_load(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    started, ended = threading.Event(), threading.Event()

    def load_slowly(_config: Any, _specs: Any, check: Callable[[], None]) -> None:
        started.set()
        try:
            while True:  # each round is an array
                check()
        finally:
            ended.set()

    def compile_largest() -> int:
        assert started.wait(30)
        return LIMIT

    monkeypatch.setattr(startup, "_load", load_slowly)
    sizing(monkeypatch, compile_largest)
    with pytest.raises(VLLMValidationError, match="KV cache"):
        prepare(config)
    assert ended.is_set()


def test_an_engine_that_is_given_up_ends_the_load(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    sizing(monkeypatch, lambda: LIMIT // 2)
    checks: list[Callable[[], None]] = []
    monkeypatch.setattr(startup, "_load", lambda _config, _specs, check: checks.append(check))
    prepared = prepare(config)
    weights_of(prepared).result()
    prepared.stop()
    with pytest.raises(_StoppedError):
        checks[0]()


@pytest.mark.parametrize("failing", ["StepCompiler", "_compile_ahead", "Prepared"])
def test_an_error_after_sizing_ends_the_load_and_the_compiler(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, failing: str
) -> None:
    sizing(monkeypatch, lambda: LIMIT // 2)
    stopped: list[type] = []
    for kind in (EarlyLoad, Programs):
        monkeypatch.setattr(kind, "stop", lambda self: stopped.append(type(self)))

    class Failing:
        def __init__(self, *_: object) -> None:
            raise OSError("out of threads")

    monkeypatch.setattr(startup, failing, Failing)
    with pytest.raises(OSError, match="out of threads"):
        prepare(config)
    assert stopped == ([Programs, EarlyLoad] if failing == "Prepared" else [EarlyLoad])


def test_parameters_are_handed_over_once() -> None:
    load = EarlyLoad(lambda _: "parameters")
    assert load.result() == "parameters"
    with pytest.raises(RuntimeError, match="handed over already"):
        load.result()


@pytest.mark.engine
def test_an_error_of_the_load_reaches_who_waits_for_it(monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(startup, "_load", fail)
    sizing(monkeypatch, lambda: LIMIT // 2)
    prepared = prepare(config)
    with pytest.raises(OSError, match="the disk is gone"):
        startup.make_launchers(prepared)
    prepared.stop()


@pytest.mark.parametrize("reason", ["a CPU", "weights are elsewhere", "several hosts", "weights do not fit"])
def test_nothing_loads_early_where(monkeypatch: pytest.MonkeyPatch, config: EngineConfig, reason: str) -> None:
    monkeypatch.setattr(startup, "_load", lambda *_: pytest.fail("weights load"))
    sizing(monkeypatch, lambda: LIMIT // 2)
    match reason:
        case "a CPU":
            monkeypatch.setattr(startup, "memory_limit", lambda _: None)
        case "weights are elsewhere":
            monkeypatch.setattr(FolderCheckpoint, "is_local", False)
        case "several hosts":
            monkeypatch.setattr(jax, "process_count", lambda: 2)
        case _:
            monkeypatch.setattr(startup, "memory_limit", lambda _: 1000)
            with pytest.raises(VLLMValidationError, match="parameters alone"):
                prepare(config)
            return
    prepared = prepare(config)
    assert prepared.weights is None
    prepared.stop()

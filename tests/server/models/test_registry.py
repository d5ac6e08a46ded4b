"""Which models are loaded, when, and what becomes of the requests that wait for them."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.models.entry import ModelUnavailableError, State
from tests.async_engine.support import until
from tests.server.models.stand_ins import MIB, Models


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in an event loop of its own; it has 20 seconds."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    return run


@in_loop
async def test_models_load_when_requests_ask_for_them() -> None:
    models = Models({"a": None, "b": None, "c": None})
    assert models.loaded == []
    await asyncio.gather(*(models.ask(name) for name in "abab"))
    assert models.log == ["load a", "load b"]
    assert models.ready == ["a", "b"]


@in_loop
async def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    models = Models({"a": None, "b": None})
    with pytest.raises(RequestFailedError, match=r"`x` does not exist. This server has `a`, `b`."):
        await models.ask("x")
    assert models.log == []


@in_loop
async def test_the_least_recently_used_leaves() -> None:
    models = Models({"a": None, "b": None, "c": None}, max_loaded=2)
    for name in "abac":
        await models.ask(name)
    assert models.log == ["load a", "load b", "close b", "load c"]


@in_loop
async def test_memory_counts_and_no_more_leave_than_must() -> None:
    models = Models({"a": 10, "b": 50, "c": 10, "d": 60}, max_mib=100)
    for name in "abcd":
        await models.ask(name)
    assert models.log == ["load a", "load b", "load c", "close b", "load d"]


@in_loop
async def test_a_model_of_unknown_size_is_alone() -> None:
    models = Models({"a": 10, "b": None, "c": 10}, max_mib=100)
    for name in "abc":
        await models.ask(name)
    assert models.log == ["load a", "close a", "load b", "close b", "load c"]


@in_loop
async def test_a_model_that_has_grown_makes_room_when_it_can() -> None:
    """What a model has taken stands in place of its estimate, also after it has left."""
    models = Models({"a": 10, "b": 50}, max_mib=100)
    for name in "ab":
        await models.ask(name)
    await models.begin("a")
    models["b"].on_measured(95 * MIB)
    models["a"].on_measured(5 * MIB)
    models.registry.plan()
    await models.settle()
    assert (models.ready, models["a"].num_bytes) == (["a"], 10 * MIB)
    models["a"].end()
    await models.ask("b")
    assert models.log == ["load a", "load b", "close b", "close a", "load b"]


@in_loop
async def test_no_request_is_cut_off_for_another_model() -> None:
    """A model in use takes no new requests, and leaves after its last; those that came meanwhile are answered later."""
    models = Models({"a": None, "b": None}, max_loaded=1)
    await models.begin("a")
    other = asyncio.create_task(models.begin("b"))
    await asyncio.sleep(0)
    again = asyncio.create_task(models.begin("a"))
    await asyncio.sleep(0.01)
    assert (other.done(), again.done(), models.loaded) == (False, False, ["a"])
    models["a"].end()
    await other
    assert (again.done(), models.loaded) == (False, ["b"])
    models["b"].end()
    await again
    assert models.log == ["load a", "close a", "load b", "close b", "load a"]


@in_loop
async def test_a_busy_model_goes_on_once_nobody_waits_for_another() -> None:
    models = Models({"a": None, "b": None}, max_loaded=1)
    await models.begin("a")
    other = asyncio.create_task(models.begin("b"))
    await asyncio.sleep(0)
    again = asyncio.create_task(models.begin("a"))
    await asyncio.sleep(0)
    other.cancel()
    await again
    assert models.log == ["load a"]
    assert models["a"].num_running == 2


@in_loop
async def test_a_failed_load_is_told_and_tried_again_after_a_pause() -> None:
    models = Models({"a": None, "b": None})
    models.loaders["a"].error = VLLMValidationError("config.json is missing")
    results = await asyncio.gather(*(models.ask("a") for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in results] == ["The model `a` cannot be loaded: config.json is missing"] * 3
    await models.begin("b")
    assert models["a"].state is State.FAILED
    with pytest.raises(ModelUnavailableError) as caught:  # the pause
        await models.begin("a")
    assert caught.value.retry_after == 1
    assert models.log.count("load a") == 1
    models.clock += 1.0
    models.loaders["a"].error = None
    await models.ask("a")
    assert (models["a"].state, models["a"].error, models["a"].num_failures) == (State.READY, None, 1)


@in_loop
async def test_pauses_double_up_to_a_minute() -> None:
    models = Models({"a": None, "b": None})
    models.loaders["a"].error = OSError("/some/secret/path")
    pauses = []
    for _ in range(9):
        models.clock += 60.0
        with pytest.raises(ModelUnavailableError) as caught:
            await models.ask("a")
        assert "secret" not in str(caught.value)
        pauses.append(caught.value.retry_after)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@in_loop
async def test_too_many_wait() -> None:
    gate = asyncio.Event()
    models = Models({"a": None, "b": None}, wait=gate.wait, max_waiting=2)
    waiting = [asyncio.create_task(models.begin("a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ModelUnavailableError, match="2 requests wait"):
        await models.begin("a")
    gate.set()
    await asyncio.gather(*waiting)


@in_loop
async def test_an_engine_that_ends_is_loaded_again() -> None:
    models = Models({"a": None, "b": None})
    watching = asyncio.create_task(models.registry.watch())
    (await models.begin("a")).engine.is_stopped = True
    await until(lambda: models.registry.entries[0].state is State.FAILED)
    models["a"].end()
    models.clock += 2.0
    await models.ask("a")
    assert models.log == ["load a", "close a", "load a"]
    watching.cancel()


@in_loop
async def test_a_model_sleeps_when_its_time_is_over() -> None:
    models = Models({"a": None, "b": None})
    await models.begin("a")
    models["a"].keep(0.05)
    await asyncio.sleep(0.1)
    assert models.ready == ["a"]  # it answers
    models["a"].end()
    assert 0.0 < (models["a"].expires_in or 0.0) <= 0.05
    await until(lambda: models.log == ["load a", "close a"])
    await models.settle()
    assert models["a"].state is State.ASLEEP
    await models.ask("a")
    assert models.ready == ["a"]


@in_loop
async def test_the_end_of_a_server_ends_loads_and_those_that_wait() -> None:
    models = Models({"a": None, "b": None}, wait=asyncio.Event().wait)
    waiting = asyncio.create_task(models.begin("a"))
    await asyncio.sleep(0)
    await models.registry.close()
    with pytest.raises(Exception, match="The server ends"):
        await waiting
    assert models.loaders["a"].is_stopped


@in_loop
async def test_a_cut_off_reaches_engines_and_those_that_wait() -> None:
    models = Models({"a": None, "b": None}, max_loaded=1)
    record = await models.begin("a")
    waiting = asyncio.create_task(models.begin("b"))
    await asyncio.sleep(0)
    error = RuntimeError("the end")
    models.registry.cut_off(error)
    assert record.engine.cut_off_by is error
    assert await asyncio.gather(waiting, return_exceptions=True) == [error]


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_are_all_answered_within_the_bounds(seed: int) -> None:
    """Some clients leave while they wait. At each moment the models that take room keep to both bounds."""
    rng = random.Random(seed)
    sizes = {"a": 30, "b": 40, "c": 50, "d": 20}
    turns = functools.partial(rng.randint, 0, 5)

    async def wait() -> None:
        for _ in range(turns()):
            await asyncio.sleep(0)

    async def run() -> None:
        models = Models(sizes, max_loaded=3, max_mib=100, wait=wait)
        counts = dict.fromkeys(sizes, 0)

        async def one(name: str) -> None:
            for _ in range(rng.randint(0, 40)):
                await asyncio.sleep(0)
            record = await models.begin(name)
            try:
                assert record.has(name)
                for _ in range(turns()):
                    assert name in models.ready  # no model leaves while it answers
                    assert len(models.loaded) <= 3
                    assert sum(sizes[each] for each in models.loaded) <= 100
                    await asyncio.sleep(0)
            finally:
                models.clock += 0.1
                models[name].end()
            counts[name] += 1

        tasks = [asyncio.create_task(one(name)) for name in rng.choices(list(sizes), k=200)]
        for task in rng.sample(tasks, 30):
            await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [each for each in results if each is not None and not isinstance(each, asyncio.CancelledError)]
        assert wrong == []
        assert sum(counts.values()) == sum(each is None for each in results) >= 170
        await models.settle()
        assert all(entry.num_running == entry.num_waiting == 0 for entry in models.registry.entries)

    asyncio.run(asyncio.wait_for(run(), 20))

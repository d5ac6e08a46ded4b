"""Replicas of a mock core behind one asynchronous engine: spread, killed under load, started again, scaled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import pytest

from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.client.replicated_core import ReplicatedCore
from jaxllm.engine.online import held_core
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineDeadError, ScalingReplacedError, VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.server.http.errors import error_response
from jaxllm.usage.usage_lib import UsageContext
from tests.async_engine.support import greedy, ids, mock_llm, nothing_left, read, read_one, tiny_args, tokens_of, until

pytestmark = pytest.mark.server

NUM_TOKENS = 60
RESTART_SECONDS = 15.0


def replicated(llm: AsyncLLM) -> ReplicatedCore:
    remote = llm._core.remote
    assert isinstance(remote, ReplicatedCore)
    return remote


def by_engine(llm: AsyncLLM, name: str) -> dict[str, Any]:
    """Return a counter's or gauge's value for each replica."""
    metrics = (each for each in llm.get_metrics() if each.name == f"vllm:{name}")
    return {each.labels["engine"]: each.value for each in metrics if hasattr(each, "value")}  # type: ignore[attr-defined]


async def outcome(llm: AsyncLLM, name: str) -> list[int] | str:
    """Return a request's tokens, or "failed" if its last output is an error, whether or not it had any."""
    outputs = await read(llm, name, greedy(seed=int(name), max_tokens=NUM_TOKENS))
    return "failed" if outputs[-1].outputs[0].finish_reason == "error" else tokens_of(outputs)


def test_a_killed_replica_ends_its_own_requests_alone_and_is_started_again() -> None:
    async def run() -> None:
        router = replicated(llm).replicas.router
        alone = [await outcome(llm, f"{number}") for number in range(2)]
        tasks = [asyncio.create_task(outcome(llm, f"{number}")) for number in range(16)]
        await until(lambda: len(router.sequences(0)) == len(router.sequences(1)) == 8)
        await asyncio.sleep(0.2)
        os.kill(llm.core_pids[1], signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert Counter(result == "failed" for result in results) == {True: 8, False: 8}
        assert all(result in ("failed", alone[number]) for number, result in enumerate(results[:2]))
        assert all(len(result) == NUM_TOKENS for result in results if result != "failed")
        await llm.check_health()
        assert len(await outcome(llm, "20")) == NUM_TOKENS, "the other one serves"
        await until(lambda: len(replicated(llm).replicas.running()) == 2, RESTART_SECONDS)
        assert [result == "failed" for result in await asyncio.gather(*[outcome(llm, f"{n}") for n in range(4)])] == (
            [False] * 4
        )
        assert await llm.reset_prefix_cache()
        tokens = by_engine(llm, "generation_tokens")
        assert tokens.keys() == {"0", "1"}
        assert all(tokens.values())
        assert by_engine(llm, "num_requests_running") == {"0": 0.0, "1": 0.0}

    with nothing_left(), mock_llm(tiny_args(data_parallel_size=2), in_process=True, tokens_per_second=60) as llm:
        asyncio.run(run())


def test_replicas_that_are_killed_all_at_once_are_started_again() -> None:
    """Several times within a minute, and also while they start; what waits for a replica meanwhile is answered."""

    def kill_all() -> None:
        for pid in llm.core_pids.values():
            os.kill(pid, signal.SIGKILL)

    async def run() -> None:
        replicas = replicated(llm).replicas
        for _ in range(2):
            tasks = [asyncio.create_task(outcome(llm, f"{number}")) for number in range(8)]
            await until(lambda: bool(replicas.router.sequences(0)) and bool(replicas.router.sequences(1)))
            kill_all()
            assert await asyncio.gather(*tasks) == ["failed"] * 8
            await until(lambda: len(replicas.running()) == 2, 2 * RESTART_SECONDS)
        kill_all()
        await until(lambda: not replicas.running())
        kill_all()
        assert len(await asyncio.wait_for(outcome(llm, "20"), 2 * RESTART_SECONDS)) == NUM_TOKENS
        assert not llm.errored
        await until(lambda: len(replicas.running()) == 2, 2 * RESTART_SECONDS)

    with nothing_left(), mock_llm(tiny_args(data_parallel_size=2), in_process=True, tokens_per_second=60) as llm:
        asyncio.run(run())


def test_replicas_are_added_drained_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        remote = replicated(llm)
        with pytest.raises(VLLMValidationError, match="no replica 5"):
            await read_on(llm, "far", 5)
        for rank in (0, 1, 1):
            await read_on(llm, f"to {rank}", rank)
        assert by_engine(llm, "request_success").keys() == {"0", "1"}
        await llm.scale_elastic_ep(3)
        assert sorted(llm.core_pids) == [0, 1, 2]
        await read_on(llm, "to 2", 2)
        assert by_engine(llm, "generation_tokens")["2"] == 8
        running = [asyncio.create_task(read_on(llm, f"long {rank}", rank, NUM_TOKENS)) for rank in (0, 1, 2)]
        await until(lambda: all(remote.replicas.router.sequences(rank) for rank in range(3)))
        await llm.scale_elastic_ep(1)
        assert [len(tokens_of(outputs)) for outputs in await asyncio.gather(*running)] == [NUM_TOKENS] * 3
        assert sorted(llm.core_pids) == [0]
        with pytest.raises(VLLMValidationError, match="no replica 1"):
            await read_on(llm, "gone", 1)
        await llm.scale_elastic_ep(2)
        cut = asyncio.create_task(read_on(llm, "cut", 1, 10 * NUM_TOKENS))
        await until(lambda: bool(remote.replicas.router.sequences(1)))
        await asyncio.sleep(0.1)
        await llm.scale_elastic_ep(1, drain_timeout=0)
        assert (await cut)[-1].outputs[0].finish_reason == "error"
        bad = tiny_args(data_parallel_size=2, tensor_parallel_size=64)
        remote.replicas._start = lambda index: RemoteCore.in_process(bad, UsageContext.LLM_CLASS, replica=index)
        with pytest.raises(RuntimeError, match=r"A replica cannot be started: .*tensor_parallel_size=64"):
            await llm.scale_elastic_ep(2)
        assert sorted(llm.core_pids) == [0]
        monkeypatch.setattr(held_core, "sleeps_in_place", lambda _: False)
        await llm.sleep()
        await llm.wake_up()
        assert sorted(llm.core_pids) == [0, 1], "as at the start"
        assert (await read_one(llm, "awake", greedy())).finished

    args = tiny_args(data_parallel_size=2)
    with nothing_left(), mock_llm(args, in_process=True, tokens_per_second=60) as llm:
        asyncio.run(run())


def test_what_goes_wrong_between_two_cores_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        replicas = replicated(llm).replicas
        pids = llm.core_pids
        long = asyncio.create_task(read_on(llm, "long", 1, 2 * NUM_TOKENS))
        await until(lambda: bool(replicas.router.sequences(1)))
        drained = asyncio.create_task(llm.scale_elastic_ep(1))
        await until(lambda: any(not each.is_open for each in replicas._replicas))
        await llm.scale_elastic_ep(2)
        with pytest.raises(ScalingReplacedError, match="to 1 replicas was replaced by scaling to 2") as caught:
            await drained
        assert error_response(caught.value).error.code == 409
        assert len(tokens_of(await long)) == 2 * NUM_TOKENS
        assert llm.core_pids == pids, "the one that drained is taken back"

        second = next(each for each in replicas._replicas if each.index == 1)
        start, failures = second._start, iter([OSError("no space left on device")])

        def start_at_last(index: int) -> RemoteCore:
            for error in failures:
                raise error
            return start(index)

        monkeypatch.setattr(second, "_start", start_at_last)
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: second.core is None)
        assert len(await outcome(llm, "1")) == NUM_TOKENS, "the other one serves"
        waiting = asyncio.create_task(read_on(llm, "waits", 1))
        await until(lambda: len(replicas.running()) == 2, RESTART_SECONDS)
        assert len(tokens_of(await waiting)) == 8

    with nothing_left(), mock_llm(tiny_args(data_parallel_size=2), in_process=True, tokens_per_second=60) as llm:
        asyncio.run(run())


async def read_on(llm: AsyncLLM, name: str, rank: int, num_tokens: int = 8) -> list[RequestOutput]:
    stream = llm.generate(ids(), greedy(max_tokens=num_tokens), name, data_parallel_rank=rank)
    return [output async for output in stream]


def test_an_engine_whose_last_replica_cannot_be_started_again_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        remote = replicated(llm)
        for replica in remote.replicas._replicas:
            monkeypatch.setattr(replica, "_num_failures", 7)  # it failed before: the next one is a minute away
        waiting = asyncio.create_task(outcome(llm, "0"))
        await until(lambda: any(remote.replicas.router.sequences(rank) for rank in range(2)))
        for pid in llm.core_pids.values():
            os.kill(pid, signal.SIGKILL)
        assert await waiting == "failed"
        await until(lambda: llm.errored)
        with pytest.raises(EngineDeadError):
            await read(llm, "late", greedy())

    with nothing_left(), mock_llm(tiny_args(data_parallel_size=2), in_process=True, tokens_per_second=60) as llm:
        asyncio.run(run())


def test_an_engine_whose_replicas_cannot_even_begin_to_start_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> RemoteCore:
        raise OSError(f"no space left for replica {index}")

    async def run() -> None:
        remote = replicated(llm)
        monkeypatch.setattr("jaxllm.engine.client.replica.MOST_FAILURES", 3)
        for replica in remote.replicas._replicas:
            monkeypatch.setattr(replica, "_start", refuse)
        running = [asyncio.create_task(read_on(llm, f"runs-{rank}", rank, 2 * NUM_TOKENS)) for rank in range(2)]
        await until(lambda: all(remote.replicas.router.sequences(rank) for rank in range(2)))
        for pid in llm.core_pids.values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: all(each.core is None for each in remote.replicas._replicas))
        assert await outcome(llm, "7") == "failed", "the last attempts fail while it waits"
        assert [(await each)[-1].outputs[0].finish_reason for each in running] == ["error"] * 2
        await until(lambda: llm.errored)
        assert remote.replicas.end_message is not None
        assert "no space left" in remote.replicas.end_message

    with nothing_left(), mock_llm(tiny_args(data_parallel_size=2), in_process=True, tokens_per_second=60) as llm:
        asyncio.run(run())


def test_new_weights_are_refused() -> None:
    """A replica that is started again would have the old ones."""

    async def run() -> None:
        for call in (llm.start_weight_update(), llm.start_draft_weight_update(), llm.update_weights("folder")):
            with pytest.raises(VLLMValidationError, match="the weights of replicas are not replaced") as caught:
                await call
            assert caught.value.parameter == "data_parallel_size"
        assert await llm.get_weight_version() == "default"

    with nothing_left(), mock_llm(tiny_args(data_parallel_size=2), in_process=True) as llm:
        asyncio.run(run())


def test_one_replica_is_neither_scaled_nor_a_thread_several() -> None:
    async def run() -> None:
        with pytest.raises(VLLMValidationError, match="data_parallel_size of 2"):
            await llm.scale_elastic_ep(2)
        with pytest.raises(VLLMValidationError, match="data_parallel_rank"):
            await read_on(llm, "far", 1)
        assert len(await read_on(llm, "here", 0)) >= 1

    with mock_llm(tiny_args()) as llm:
        asyncio.run(run())
    with pytest.raises(VLLMValidationError, match="processes of their own"):
        AsyncLLM.from_engine_args(tiny_args(data_parallel_size=2), disable_frontend_multiprocessing=True)

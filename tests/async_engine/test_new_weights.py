"""`AsyncLLM` gets new weights while requests run, which are aborted, end first, or go on with them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm import LLM
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError, VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.async_engine.support import greedy, ids, nothing_left, tiny_args, tokens_of
from tests.e2e.test_weight_update import CASE, changed, saved
from tests.models.tiny import folder

pytestmark = pytest.mark.engine

NUM_TOKENS, BEFORE = 60, 8
PROMPT = [3 + 5 * number % 250 for number in range(20)]
LONG = greedy(max_tokens=NUM_TOKENS, ignore_eos=True)


def expected(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of a new engine."""
    args = tiny_args()
    settings = {name: getattr(args, name) for name in ("dtype", "block_size", "max_num_batched_tokens", "hf_overrides")}
    with LLM(str(path), skip_tokenizer_init=True, enforce_eager=True, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with other weights of the case."""
    return saved(CASE, changed(CASE), tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def old_tokens() -> list[int]:
    return expected(folder(CASE), PROMPT, NUM_TOKENS)


@pytest.fixture(scope="module")
def new_tokens(other: Path) -> list[int]:
    return expected(other, PROMPT, NUM_TOKENS)


def run(with_llm: Any, *, in_thread: bool) -> None:
    async def use() -> None:
        async with AsyncLLM.from_engine_args(tiny_args(), disable_frontend_multiprocessing=in_thread) as llm:
            await with_llm(llm)

    with nothing_left():
        asyncio.run(use())


async def answer(llm: AsyncLLM, name: str) -> list[int]:
    return tokens_of([output async for output in llm.generate(ids(PROMPT), LONG, name)])


async def begin(llm: AsyncLLM, name: str) -> tuple[asyncio.Task[Any], list[RequestOutput]]:
    """Start a request; return its task once some tokens have come, and the outputs that the task adds to."""
    outputs: list[RequestOutput] = []

    async def read() -> None:
        async for output in llm.generate(ids(PROMPT), LONG, name):
            outputs.append(output)

    task = asyncio.create_task(read())
    while len(outputs) < BEFORE:
        await asyncio.sleep(0.001)
    return task, outputs


def test_modes(other: Path, old_tokens: list[int], new_tokens: list[int]) -> None:
    tensors = {name: jnp.asarray(tensor) for name, tensor in changed(CASE).items()}

    async def use(llm: AsyncLLM) -> None:
        assert await answer(llm, "old") == old_tokens
        assert await llm.get_weight_version() == "default"
        task, outputs = await begin(llm, "unsaid")
        with pytest.raises(VLLMValidationError, match=r"1 requests are unfinished: call pause_generation\(\) first"):
            await llm.update_weights(tensors, version=0)
        await llm.update_weights(tensors, version=1, mode="wait")
        assert task.done()
        assert tokens_of(outputs) == old_tokens, "it ended with the old weights"
        assert await answer(llm, "new") == new_tokens
        await llm.update_weights(str(folder(CASE)), version="2")
        assert await llm.get_weight_version() == "2"

        task, outputs = await begin(llm, "aborted")
        await llm.update_weights(tensors, mode="abort")
        await task
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert await answer(llm, "new again") == new_tokens
        await llm.update_weights(str(folder(CASE)))

        task, outputs = await begin(llm, "kept")
        await llm.update_weights(tensors, mode="keep")
        await task
        await check_kept(tokens_of(outputs), other, old_tokens)

    run(use, in_thread=True)


async def check_kept(tokens: list[int], other: Path, old_tokens: list[int]) -> None:
    """Assert that a request went on with new weights after some tokens, computed again from its first token on."""
    assert len(tokens) == NUM_TOKENS
    num_old = next(i for i, pair in enumerate(zip(tokens, old_tokens, strict=True)) if pair[0] != pair[1])
    assert num_old >= BEFORE - 1
    rest = [expected(other, PROMPT + tokens[:count], NUM_TOKENS - count) for count in range(BEFORE - 1, num_old + 1)]
    assert any(tokens[-len(each) :] == each for each in rest), "no count of tokens before the update explains the rest"


def test_a_pause_keeps_requests(other: Path, old_tokens: list[int], new_tokens: list[int]) -> None:
    async def use(llm: AsyncLLM) -> None:
        task, outputs = await begin(llm, "kept")
        await llm.pause_generation(mode="keep", clear_cache=False)
        await asyncio.sleep(0.05)
        num_outputs = len(outputs)
        waiting = asyncio.create_task(answer(llm, "later"))
        await asyncio.sleep(0.1)
        assert (len(outputs), task.done(), waiting.done()) == (num_outputs, False, False)
        await llm.resume_generation()
        assert await waiting == old_tokens
        await task
        assert tokens_of(outputs) == old_tokens

        task, outputs = await begin(llm, "kept by vLLM's steps")
        await llm.pause_generation(mode="keep")
        await llm.start_weight_update()
        await llm.update_weights({"update_info": {"weights_path": str(other)}})
        assert await llm.get_weight_version() == "default"
        await llm.finish_weight_update("step-1")
        assert await llm.get_weight_version() == "step-1"
        await llm.resume_generation()
        await task
        await check_kept(tokens_of(outputs), other, old_tokens)
        assert await answer(llm, "new") == new_tokens

    run(use, in_thread=False)


def test_a_core_in_a_process(other: Path, new_tokens: list[int]) -> None:
    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(VLLMValidationError, match="another process, which arrays do not reach"):
            await llm.update_weights(changed(CASE))
        with pytest.raises(VLLMValidationError, match="neither a folder"):
            await llm.update_weights(str(other / "missing"))
        await llm.update_weights(str(other), version="new")
        assert await answer(llm, "new") == new_tokens
        await llm.sleep(2)
        with pytest.raises(EngineBusyError, match="sleeps"):
            await llm.update_weights(str(other))
        await llm.wake_up(["weights"])
        with pytest.raises(VLLMValidationError, match="no update has begun"):
            await llm.finish_weight_update()
        await llm.update_weights(str(other))
        await llm.wake_up(["kv_cache"])
        assert await answer(llm, "awake") == new_tokens
        await llm.update_weight_version("named")
        assert await llm.get_weight_version() == "named"

    run(use, in_thread=False)


def test_a_cancelled_update_is_dropped(old_tokens: list[int]) -> None:
    tensors = changed(CASE)

    async def use(llm: AsyncLLM) -> None:
        task, outputs = await begin(llm, "runs")
        update: Coroutine[Any, Any, None] = llm.update_weights(tensors, mode="wait", version="never")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(update, 0.01)
        await task
        assert tokens_of(outputs) == old_tokens
        assert await answer(llm, "old") == old_tokens
        with pytest.raises(VLLMValidationError, match="no update has begun"):
            await llm.finish_weight_update()

    run(use, in_thread=True)

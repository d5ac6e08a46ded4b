"""Engines start, sleep and end: what cannot be started is refused as `LLM` refuses it, and nothing stays behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lib.mock_core import start_mock_process

from jaxllm import LLM
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.online import held_core
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from tests.async_engine.support import END_SECONDS, greedy, mock_llm, nothing_left, read, tiny_args, tokens_of
from tests.models.tiny import folder

pytestmark = pytest.mark.server

SCRIPT = """
import asyncio, sys
from jaxllm import LLM, AsyncLLM, SamplingParams
from tests.async_engine.support import PROMPT, core_process, greedy, mock_llm, read, tiny_args

async def run(llm):
    print(core_process(llm).pid, flush=True)
    await asyncio.gather(*(read(llm, str(i), greedy(max_tokens=400)) for i in range(4)))

if __name__ == "__main__":
    with mock_llm(tiny_args(), in_process=True, tokens_per_second=2) as llm:
        asyncio.run(run(llm))
"""


def spoiled(tmp_path: Path, name: str) -> tuple[str, dict[str, Any]]:
    """Return the folder of a checkpoint that cannot be used, and arguments that are wrong."""
    if name == "no folder":
        return str(tmp_path / "nothing"), {}
    if name == "too little memory":
        return str(folder("llama3_tied")), {"num_gpu_blocks_override": 2, "max_model_len": 256}
    for path in folder("llama3_tied").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if name == "corrupt shard":
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    else:
        config = (tmp_path / "config.json").read_text()
        (tmp_path / "config.json").write_text(config.replace("LlamaForCausalLM", "NobodysModel"))
    return str(tmp_path), {}


@pytest.mark.parametrize("name", ["no folder", "corrupt shard", "unsupported architecture", "too little memory"])
def test_r25_what_cannot_start_says_why_as_llm_does(tmp_path: Path, name: str) -> None:
    """R25: the error that `LLM` raises comes through the process, soon, and no process stays."""
    model, arguments = spoiled(tmp_path, name)
    args = tiny_args(**arguments)
    args.model = model
    fields = {name: getattr(args, name) for name in EngineArgs.__dataclass_fields__}
    with pytest.raises(VLLMValidationError) as expected:
        LLM.from_engine_args(EngineArgs(**fields))
    started = time.monotonic()
    with nothing_left(0.2), pytest.raises(VLLMValidationError) as caught:
        AsyncLLM.from_engine_args(args)
    assert time.monotonic() - started < 20  # 5 seconds on a machine that has nothing else to do
    assert str(caught.value) == str(expected.value)
    assert caught.value.parameter == expected.value.parameter


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: RemoteCore) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteCore, "wait_ready", interrupt)
    with nothing_left(), pytest.raises(KeyboardInterrupt):
        AsyncLLM.from_engine_args(tiny_args())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_front_end_that_ends_takes_its_core_along(number: int, tmp_path: Path, repository: Path) -> None:
    """However it ends: in the middle of requests, without a word, or by Ctrl-C."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{repository}:{repository / 'scripts'}", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as front:
        assert front.stdout is not None
        core = psutil.Process(int(front.stdout.readline()))
        time.sleep(0.3)
        front.send_signal(number)
        assert front.wait(10) != 0
        core.wait(END_SECONDS + 3)
    assert not list(tmp_path.glob("jaxllm-*"))


def test_a_script_whose_core_dies_ends_with_the_reason(tmp_path: Path, repository: Path) -> None:
    """R1: its status is not 0, and its last line says what has happened."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{repository}:{repository / 'scripts'}", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as front:
        assert front.stdout is not None
        assert front.stderr is not None
        os.kill(int(front.stdout.readline()), signal.SIGKILL)
        printed = front.stderr.read()
        assert front.wait(10) == 1
    assert "EngineDeadError" in printed
    assert "SIGKILL" in printed.splitlines()[-1]


@pytest.mark.parametrize("in_place", [True, False])
def test_sleeps_and_wakes_several_times(tokenizer: str, monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """In the core, or by its end and another's start: no file descriptor, no thread and no process is lost."""
    monkeypatch.setattr(held_core, "sleeps_in_place", lambda _: in_place)

    def resources() -> tuple[int, int]:
        here = psutil.Process()
        return here.num_fds(), here.num_threads()

    async def run() -> None:
        gc.collect()  # what earlier tests have left open in cycles is not to be closed, and missed, between two counts
        # The loop's pool of threads grows while none of them is idle: here, and not later.
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(64)))
        expected = tokens_of(await read(llm, "before", greedy()))
        before: list[tuple[int, int]] = []
        for turn in range(4):
            cut = asyncio.create_task(read(llm, f"cut off {turn}", greedy(max_tokens=400)))
            await asyncio.sleep(0.1)
            await llm.sleep()
            assert (await cut)[-1].outputs[0].finish_reason == "abort"
            assert await llm.is_sleeping()
            assert not llm.errored
            for call in (lambda: read(llm, "late", greedy()), llm.check_health, llm.reset_prefix_cache):
                with pytest.raises(RuntimeError, match="wake_up"):
                    await call()
            await asyncio.gather(llm.wake_up(), llm.wake_up())
            assert not await llm.is_sleeping()
            assert tokens_of(await read(llm, "after", greedy())) == expected
            before.append(resources())
        # No more than before: what else this process has, which other tests share, may be closed meanwhile.
        assert before[-1][0] <= before[1][0]
        assert before[-1][1] <= before[1][1]

    with nothing_left(), mock_llm(tiny_args(tokenizer), tokens_per_second=200) as llm:
        asyncio.run(run())


def test_an_engine_that_nobody_holds_ends_its_core() -> None:
    """Its loop is closed, nobody has called `shutdown`, and the garbage collector comes by."""

    def use() -> None:
        start = functools.partial(start_mock_process, tiny_args())
        llm = AsyncLLM(start, admission=Admission(None, None))
        asyncio.run(read(llm, "a", greedy()))

    with nothing_left(5):
        use()
        gc.collect()


def test_a_profile_comes_from_the_core(tmp_path: Path) -> None:
    async def run() -> None:
        await llm.start_profile()
        await read(llm, "recorded", greedy())
        await llm.stop_profile()

    args = tiny_args(profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path)})
    with nothing_left(), AsyncLLM.from_engine_args(args) as llm:
        asyncio.run(run())
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]

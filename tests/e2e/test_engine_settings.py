"""Odd limits change no token; engines live side by side and leave nothing; a second start compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm import LLM, EngineArgs, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.scheduling.scheduler import Scheduler
from tests.e2e.inside import core_of, scheduler_of
from tests.execution.support import hostile_jax
from tests.models.tiny import folder
from tests.quick import QUICK_FLAGS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 8,
    "max_model_len": 64,
    "block_size": 16,
    "use_tqdm_on_load": False,
}


def make(case: str = "qwen3", **changes: Any) -> LLM:
    return LLM(str(folder(case)), **(SMALL | changes))


def tokens(llm: LLM) -> list[list[int]]:
    """Return the tokens of a few prompts, the first one five times."""
    params = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, n=n) for n in (5, 1, 1)]
    prompts = [list(range(1, 20)), [7], list(range(30, 70))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with make() as llm:
        result = tokens(llm)
    assert all(each == result[0] for each in result[:5])
    return result


ODD: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 1, "max_num_seqs": None},
    {"max_num_batched_tokens": 7, "max_num_seqs": 2, "kv_cache_memory_bytes": "1m"},
    {"block_size": 128, "max_num_seqs": 1},
    {"cudagraph_capture_sizes": [16, 5000], "max_num_batched_tokens": 64},
    {"num_gpu_blocks_override": 5},
    {"async_scheduling": False, "enable_prefix_caching": False, "long_prefill_token_threshold": 3},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
]


@pytest.mark.parametrize("changes", ODD, ids=lambda changes: next(iter(changes)))
def test_odd_limits_change_no_token(changes: dict[str, Any], expected: list[list[int]]) -> None:
    with make(**changes) as llm:
        assert tokens(llm) == expected
        scheduler = scheduler_of(llm)
        scheduler.check()
        stats = scheduler.stats()
    assert stats.num_blocks_in_use == 0
    if "num_gpu_blocks_override" in changes:
        assert stats.num_preemptions > 0


class CountingScheduler(Scheduler):
    """A user's scheduler."""

    num_plans = 0

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        type(self).num_plans += 1
        return super().plan(*args, **kwargs)


def test_priorities_and_a_scheduler_of_ones_own() -> None:
    settings: dict[str, Any] = {**SMALL, "max_num_seqs": 1, "scheduling_policy": "priority"}
    args = EngineArgs(str(folder("qwen3")), **settings, scheduler_cls=CountingScheduler)
    with LLM.from_engine_args(args) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        for request_id, priority in (("last", 5), ("second", 0), ("first", -1)):
            llm.llm_engine.add_request(request_id, [1, 2, 3], params, priority=priority)
        ended: list[str] = []
        while llm.llm_engine.has_unfinished_requests():
            ended += [output.request_id for output in llm.llm_engine.step() if output.finished]
        assert ended == ["first", "second", "last"]
        assert CountingScheduler.num_plans > 5
    with pytest.raises(VLLMValidationError, match=r"nowhere\.Scheduler"):
        make(scheduler_cls="nowhere.Scheduler")


def test_engines_live_side_by_side_and_leave_nothing(expected: list[list[int]]) -> None:
    def used() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    before = used()
    first = make()
    alone = used()
    second = make("llama2", enforce_eager=False)
    assert tokens(first) == expected != tokens(second)
    engine, programs = second.llm_engine, weakref.ref(core_of(second)._runner.programs)  # type: ignore[union-attr]
    del second
    assert used() > alone
    assert programs()
    del engine
    assert used() == alone
    deadline = time.monotonic() + 60  # nobody waits for what is just being compiled
    while programs() or [thread for thread in threading.enumerate() if thread.name == "jaxllm-compile"]:
        assert time.monotonic() < deadline, "what compiles programs outlives its engine"
        time.sleep(0.05)
    first.shutdown()
    assert used() == before, "parameters and KV cache outlive shutdown"
    with pytest.raises(RuntimeError, match="shut down"):
        tokens(first)
    with make() as again:
        assert tokens(again) == expected


def test_the_users_jax_settings_change_nothing_and_stay(expected: list[list[int]]) -> None:
    with hostile_jax():
        with make() as llm:
            assert tokens(llm) == expected
        assert jax.config.jax_enable_x64
        assert jax.config.jax_numpy_rank_promotion == "raise"


FORK = """
import json, multiprocessing, os, sys, threading
from jaxllm import LLM
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
before = llm.generate([[1, 2, 3]], use_tqdm=False)
child = os.fork()
if child == 0:
    for use in (lambda: llm.generate([[1, 2, 3]], use_tqdm=False), lambda: LLM(sys.argv[1], **json.loads(sys.argv[2]))):
        try:
            use()
        except RuntimeError as error:
            print(error, flush=True)
    sys.exit(7)
hung = threading.Timer(30, os.kill, (child, 9))
hung.start()
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
hung.cancel()
print(len(llm.generate([[1, 2, 3]], use_tqdm=False)))
queue = multiprocessing.Queue()
"""


def test_a_forked_child_is_told_to_spawn_and_all_exit_without_a_word(repository: Path) -> None:
    """A queue changes the order in which an interpreter that goes down ends what is left."""
    settings = json.dumps(SMALL | {"enforce_eager": False, "disable_log_stats": True})
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(folder("qwen3")), settings]
    env = os.environ | {"PYTHONPATH": str(repository), "XLA_FLAGS": QUICK_FLAGS}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=90)
    *messages, status, answers = done.stdout.splitlines()
    assert len(messages) == 2
    assert all("Start children with multiprocessing.get_context('spawn')" in message for message in messages)
    assert (status, answers) == ("status 7", "1")
    expected = (" INFO ", " WARNING attention runs in plain XLA")
    assert not [line for line in done.stderr.splitlines() if not any(each in line for each in expected)]


SECOND_START = """
import json, sys
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, fun_name="", **__: compiled.append(fun_name) if name.endswith("backend_compile_duration") else None
)
from jaxllm import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, detokenize=False, logprobs=1), use_tqdm=False)
print(json.dumps(compiled))
"""


def test_a_second_start_compiles_nothing_and_says_what_runs(tmp_path: Path, repository: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    env |= {"JAXLLM_CACHE": str(tmp_path), "PYTHONPATH": str(repository), "XLA_FLAGS": QUICK_FLAGS}
    command = [sys.executable, "-c", SECOND_START, str(folder("qwen3")), json.dumps(SMALL)]
    runs = [subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (json.loads(run.stdout) for run in runs)
    assert first.count("jit(run_step)") > 0
    assert not second
    line = next(line for line in runs[1].stderr.splitlines() if "KV blocks" in line)
    for part in ("jaxllm 0.", str(folder("qwen3")), "on 1 cpu", "float32", "33 KV blocks of 16", "context 64"):
        assert part in line

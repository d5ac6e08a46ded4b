"""An `LLM` that sleeps leaves nothing on the device, and wakes with the same bits, bytes and programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import monitoring

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.exceptions import EngineBusyError, VLLMValidationError
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.tiers.host_array import HostArrays
from tests.e2e import adapter_data, media_goldens
from tests.e2e.guessing import head_config
from tests.e2e.inside import assert_nothing_left, core_of, scheduler_of
from tests.e2e.tiny_engine import NUM_LOGPROBS, Job, bits, run_together, tiny_llm
from tests.models.heads import model_folder
from tests.models.tiny import folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_garbage")]

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=NUM_LOGPROBS, ignore_eos=True)
JOBS = [Job([3 + (7 * number + 5 * i) % 250 for i in range(20 + 9 * number)], PARAMS) for number in range(4)]
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
SETTINGS |= {"num_gpu_blocks_override": 40, "cudagraph_capture_sizes": [8]}
LEVELS = (1, 2)


def live_bytes() -> int:
    """Return the bytes of all arrays on devices."""
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Count what XLA compiles, and what it finds compiled on disk."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    monitoring.register_event_duration_secs_listener(note)
    try:
        yield events
    finally:
        monitoring.unregister_event_duration_listener(note)


def release_to_host(runner: ModelRunner, *, keeps_weights: bool) -> None:
    """Do as `release_device` does on other devices than this CPU; at level 1 no checkpoint may be read then."""
    if keeps_weights:
        host = HostArrays()
        for launcher in runner._launchers():
            launcher.copy_weights(host)
            launcher._load_params = lambda: pytest.fail("the checkpoint was read")
    RELEASE(runner, keeps_weights=False)


RELEASE = ModelRunner.release_device


@pytest.fixture
def kept_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let level 1 keep weights in the host's memory."""
    monkeypatch.setattr(ModelRunner, "release_device", release_to_host)


def check_sleeps(llm: LLM, num_sleeps: int, levels: tuple[int, ...], tags: list[list[str] | None]) -> None:
    """Sleep and wake up several times: answers, bytes and programs stay."""
    expected = [bits(output) for output in run_together(llm, JOBS)]
    assert [bits(output) for output in run_together(llm, JOBS)] == expected
    awake, num_programs = live_bytes(), core_of(llm).num_compiled
    with counting_compilations() as compiled:
        for number in range(num_sleeps):
            llm.sleep(levels[number % len(levels)])
            assert llm.is_sleeping()
            for some in tags:
                assert llm.is_sleeping()
                llm.wake_up(some)
            assert not llm.is_sleeping()
            outputs = run_together(llm, JOBS)
            assert [bits(output) for output in outputs] == expected
            assert {output.num_cached_tokens for output in outputs} == {0}, "a prefix was not forgotten"
    assert live_bytes() == pytest.approx(awake, rel=0.01)
    assert (core_of(llm).num_compiled, compiled) == (num_programs, [])
    assert_nothing_left(scheduler_of(llm))


def test_a_hundred_sleeps() -> None:
    outside = live_bytes()
    with tiny_llm("llama3_tied", **SETTINGS) as (llm, _):
        check_sleeps(llm, 100, LEVELS, [None])
        for level in LEVELS:
            llm.sleep(level)
            assert live_bytes() - outside < 1000, "the device is free, but for constants"
            llm.wake_up()


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_parts_wake_one_by_one(tags: list[str]) -> None:
    with tiny_llm("llama3_tied", **SETTINGS) as (llm, _):
        check_sleeps(llm, 2, LEVELS, [[tag] for tag in tags])
        llm.sleep()
        llm.wake_up(tags[:1])
        with pytest.raises(EngineBusyError, match=rf"wake_up\(\) first, '{tags[1]}' is not awake"):
            run_together(llm, JOBS)
        asleep = live_bytes()
        llm.wake_up(tags[:1])
        assert live_bytes() == asleep, "it was awake already"
        llm.wake_up([])
        assert llm.is_sleeping()
        llm.wake_up()
        assert len(run_together(llm, JOBS)) == len(JOBS)


@pytest.mark.parametrize("case", ["qwen3_next", "gpt_oss", "deepseek_v2_lite"])
def test_other_caches(case: str) -> None:
    """Recurrent states, windows and latents."""
    with tiny_llm(case, **SETTINGS) as (llm, _):
        check_sleeps(llm, 3, LEVELS, [None])


@pytest.mark.usefixtures("kept_on_host")
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama3_tied", {}),
        ("qwen3_next", {}),
        ("llama3_tied", {"quantization": "int8"}),
        ("llama3_tied", {"speculative_config": {"model": str(folder("llama3_tied")), "num_speculative_tokens": 2}}),
        (model_folder("eagle3"), {"speculative_config": head_config("eagle3")}),
    ],
    ids=["plain", "recurrent", "quantized", "draft", "head"],
)
def test_weights_kept_on_the_host_come_back(case: str | Path, changes: dict[str, Any]) -> None:
    with tiny_llm(case, **SETTINGS, **changes) as (llm, _):
        check_sleeps(llm, 2, (1,), [["weights"], ["kv_cache"]])


def test_two_devices() -> None:
    """Parts of weights come back to their devices, from the host and from the checkpoint."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "tests.e2e.sleep_runs"]
    done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_blocks_on_the_host_are_forgotten() -> None:
    with tiny_llm("llama3_tied", **SETTINGS | {"num_gpu_blocks_override": 12, "kv_offloading_size": 0.01}) as (llm, _):
        check_sleeps(llm, 4, LEVELS, [None])
        llm.sleep()
        llm.shutdown()


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_are_written_again(level: int) -> None:
    name, *others = adapter_data.names_of("llama3_tied")[:3]
    adapters = [adapter_data.request(each, "llama3_tied") for each in (name, *others)]
    prompts = [adapter_data.prompt_of("llama3_tied")] * len(adapters)
    with LLM(str(folder("llama3_tied")), max_loras=2, max_cpu_loras=4, **adapter_data.SETTINGS) as llm:

        def answers() -> list[list[list[float]]]:
            outputs = adapter_data.generate(llm, prompts, adapters)
            return [adapter_data.logprobs_of(output).tolist() for output in outputs]

        expected = answers()
        assert expected[0] != expected[1]
        for _ in range(3):
            llm.sleep(level)
            llm.wake_up()
            scheduler_of(llm).check()
            assert answers() == expected


@pytest.mark.parametrize("level", LEVELS)
def test_pictures_are_encoded_again(level: int) -> None:
    golden = media_goldens.read_golden("qwen2_5_vl", "two")
    prompt = media_goldens.prompt_of("qwen2_5_vl", golden)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 320, "num_gpu_blocks_override": 40}
    settings |= {"skip_tokenizer_init": False}
    with tiny_llm(media_goldens.folder("qwen2_5_vl"), **settings) as (llm, _):
        [expected] = llm.generate(prompt, PARAMS, use_tqdm=False)
        assert bits(llm.generate(prompt, PARAMS, use_tqdm=False)[0]) == bits(expected)
        awake = live_bytes()
        with counting_compilations() as compiled:
            for _ in range(2):
                llm.sleep(level)
                llm.wake_up()
                [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
                assert bits(output) == bits(expected)
        assert (live_bytes(), compiled) == (awake, [])


def test_calls_while_asleep() -> None:
    with tiny_llm("llama3_tied", **SETTINGS) as (llm, _):
        prompt = TokensPrompt(prompt_token_ids=JOBS[0].prompt)
        llm.enqueue(prompt, PARAMS)
        for mode in ("abort", "wait"):
            with pytest.raises(VLLMValidationError, match="1 requests are unfinished"):
                llm.sleep(mode=mode)
        assert len(llm.wait_for_completion(use_tqdm=False)) == 1
        llm.sleep(2)
        llm.sleep(1)
        calls = (
            lambda: llm.generate(prompt, PARAMS),
            lambda: llm.enqueue(prompt, PARAMS),
            lambda: llm.llm_engine.add_request("a", prompt, PARAMS),
        )
        for call in calls:
            with pytest.raises(EngineBusyError, match=r"sleeps: call wake_up\(\) first"):
                call()
        assert llm.reset_prefix_cache()
        assert llm.llm_engine.step() == []
        sleeping = [each for each in llm.get_metrics() if each.name == "vllm:engine_sleep_state"]
        assert {each.labels["sleep_state"]: each.value for each in sleeping} == {  # type: ignore[attr-defined]
            "awake": 0,
            "weights_offloaded": 0,
            "discard_all": 1,
        }
        llm.wake_up()
        assert len(run_together(llm, JOBS)) == len(JOBS)


def test_weights_that_cannot_be_read() -> None:
    """The engine goes on sleeping, and wakes once they can."""
    with tiny_llm("llama3_tied", **SETTINGS) as (llm, _):
        expected = [bits(output) for output in run_together(llm, JOBS)]
        runner = core_of(llm)._runner
        assert runner is not None
        load = runner.launcher._load_params

        def fail() -> None:
            raise OSError("the disk is gone")

        llm.sleep(2)
        runner.launcher._load_params = fail
        with pytest.raises(OSError, match="the disk is gone"):
            llm.wake_up()
        assert llm.is_sleeping()
        with pytest.raises(EngineBusyError):
            run_together(llm, JOBS)
        runner.launcher._load_params = load
        llm.wake_up()
        assert [bits(output) for output in run_together(llm, JOBS)] == expected


def test_a_core_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_ENABLE_V1_MULTIPROCESSING", "1")
    settings = SETTINGS | {"scheduler_cls": None, "dtype": "float32", "block_size": 16, "max_logprobs": NUM_LOGPROBS}
    settings |= {"skip_tokenizer_init": True, "enforce_eager": True}
    with LLM(str(folder("llama3_tied")), **settings) as llm:
        expected = [bits(output) for output in run_together(llm, JOBS)]
        for level in LEVELS:
            llm.sleep(level)
            with pytest.raises(EngineBusyError):
                run_together(llm, JOBS)
            llm.wake_up(["weights"])
            llm.wake_up(["kv_cache"])
            outputs = run_together(llm, JOBS)
            assert [bits(output) for output in outputs] == expected
            assert {output.num_cached_tokens for output in outputs} == {0}

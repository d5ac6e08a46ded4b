"""Weights that are replaced in place give the bits of a new engine made from a checkpoint with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.exceptions import VLLMValidationError
from tests.e2e import adapter_data, test_kv_offloading
from tests.e2e.guessing import Guesses, head_config
from tests.e2e.inside import core_of, scheduler_of
from tests.e2e.test_sleep import JOBS, SETTINGS, counting_compilations
from tests.e2e.tiny_engine import bits, run_together, tiny_llm
from tests.models.tiny import folder, read_tensors

pytestmark = pytest.mark.engine

CASE = "llama3_tied"
CASES = (CASE, "qwen3_next", "gpt_oss", "deepseek_v2_lite", "phi3")


def changed(case: str, seed: int = 1) -> dict[str, np.ndarray]:
    """Return a case's tensors, each a little different."""
    rng = np.random.default_rng(seed)
    return {
        name: (tensor * (1 + 0.1 * rng.standard_normal(tensor.shape))).astype(tensor.dtype)
        if jnp.issubdtype(tensor.dtype, jnp.floating)  # numpy knows no bfloat16
        else tensor
        for name, tensor in read_tensors(case).items()
    }


def saved(case: str, tensors: dict[str, np.ndarray], path: Path) -> Path:
    """Save a checkpoint of a case with other tensors and return its folder."""
    shutil.copytree(folder(case), path)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors")
    return path


def answers(llm: LLM) -> list[Any]:
    return [bits(output) for output in run_together(llm, JOBS)]


def expected_of(path: Path, **settings: Any) -> list[Any]:
    with tiny_llm(path, **SETTINGS, **settings) as (llm, _):
        return answers(llm)


@pytest.mark.parametrize("changes", [{}, {"quantization": "int8"}], ids=["float32", "int8"])
def test_tensors_by_name_give_the_bits_of_a_new_engine(changes: dict[str, Any], tmp_path: Path) -> None:
    tensors = changed(CASE)
    expected = expected_of(saved(CASE, tensors, tmp_path / "new"), **changes)
    with tiny_llm(CASE, **SETTINGS, **changes) as (llm, _):
        before = answers(llm)
        assert before != expected
        assert llm.get_weight_version() == "default"
        llm.update_weights({name: jnp.asarray(tensor) for name, tensor in tensors.items()}, version=1)
        assert llm.get_weight_version() == 1
        num_programs = core_of(llm).num_compiled
        outputs = run_together(llm, JOBS)
        assert [bits(output) for output in outputs] == expected
        assert {output.num_cached_tokens for output in outputs} == {0}, "a prefix was not forgotten"
        with counting_compilations() as compiled:
            llm.update_weights({name: jnp.asarray(tensor) for name, tensor in read_tensors(CASE).items()}, version="2")
            assert answers(llm) == before
            llm.update_weights(tensors)
            assert answers(llm) == expected
        assert (compiled, core_of(llm).num_compiled) == ([], num_programs)
        assert llm.get_weight_version() == "2"


@pytest.mark.parametrize("case", CASES[1:])
def test_other_families(case: str, tmp_path: Path) -> None:
    """Fused tensors, experts, latents and recurrent layers."""
    tensors = changed(case)
    expected = expected_of(saved(case, tensors, tmp_path / "new"))
    with tiny_llm(case, **SETTINGS) as (llm, _):
        llm.update_weights(tensors)
        assert answers(llm) == expected


def test_a_folder_and_vllms_form(tmp_path: Path) -> None:
    path = saved(CASE, changed(CASE), tmp_path / "new")
    expected = expected_of(path)
    with tiny_llm(CASE, **SETTINGS) as (llm, _):
        before = answers(llm)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"weights_path": str(path)}})
        assert answers(llm) == before, "steps read the old weights"
        llm.finish_weight_update("step-1")
        assert answers(llm) == expected
        assert llm.get_weight_version() == "step-1"


def pointers(weights: Any) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(weights)]


def test_arrays_like_the_engines_are_taken_over_without_a_copy() -> None:
    with tiny_llm(CASE, **SETTINGS) as (llm, _):
        before, old = answers(llm), llm.get_weights()
        train = jax.jit(lambda tree: jax.tree.map(lambda array: array * 1.25, tree))
        llm.update_weights(train(old))
        new = old
        with counting_compilations() as compiled, jax.transfer_guard_device_to_host("disallow"):
            for number in range(20):
                new = train(new)
                llm.update_weights(new, version=number)
                assert pointers(llm.get_weights()) == pointers(new)
                assert llm.get_weight_version() == number
        assert compiled == []
        assert answers(llm) != before
        llm.update_weights(jax.tree.map(lambda array: array.astype(jnp.float16), old))
        llm.update_weights(old)
        assert answers(llm) == before
        llm.update_weights({"update_info": {"weights": changed(CASE)}})
        assert not any(array.is_deleted() for array in jax.tree.leaves((old, new))), "the trainer's own arrays stay"


def test_rounding_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint is in bfloat16, and so is what the engine holds, though it computes in float32."""
    tensors = {name: tensor.astype(np.float32) for name, tensor in changed(CASE).items()}
    with tiny_llm(CASE, **SETTINGS) as (llm, _):
        llm.update_weights(changed(CASE))
        expected = answers(llm)
        assert "is rounded" not in caplog.text
        for _ in range(2):
            llm.update_weights(tensors)
        assert caplog.text.count("is rounded to bfloat16") == 1
        assert answers(llm) == expected


def wrong(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(changed(CASE))
    change(tensors)
    return tensors


EMBEDDING = "model.embed_tokens.weight"
Q, K = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all_: all_.update(nobody=all_[Q]), "no tensor 'nobody'"),
        (lambda all_: all_.update({"lm_head.weight": all_[EMBEDDING]}), "its embedding is its output head"),
        (lambda all_: all_.pop(K), f"'{K}' is missing"),
        (lambda all_: all_.update({Q: all_[Q][:-1]}), f"'{Q}' has shape"),
        (lambda all_: all_.update({Q: all_[Q].astype(np.int32)}), f"'{Q}' has dtype int32"),
    ],
    ids=["unknown", "tied head", "missing", "shape", "kind"],
)
def test_what_does_not_fit_changes_nothing(shared_llm: LLM, change: Any, message: str) -> None:
    before = answers(shared_llm)
    with pytest.raises(VLLMValidationError, match=message):
        shared_llm.update_weights(wrong(change), version="never")
    assert answers(shared_llm) == before
    assert shared_llm.get_weight_version() == "default"


@pytest.fixture(scope="module")
def shared_llm() -> Any:
    with tiny_llm(CASE, **SETTINGS) as (llm, _):
        yield llm


def test_other_calls_that_are_refused(shared_llm: LLM, tmp_path: Path) -> None:
    array = jnp.zeros((2, 2))
    array.delete()
    calls: list[tuple[Callable[[], Any], str]] = [
        (shared_llm.finish_weight_update, "no update has begun"),
        (shared_llm.start_draft_weight_update, "no draft model"),
        (lambda: shared_llm.update_weights({"update_info": {"names": [], "shapes": []}}), "NCCL and IPC"),
        (lambda: shared_llm.update_weights(str(tmp_path / "no")), "neither a folder"),
        (lambda: shared_llm.update_weights({"layers": {"what": np.zeros(1)}}), r"no array 'layers\.what'"),
        (lambda: shared_llm.update_weight_version(True), "a text or a whole number"),
        (lambda: shared_llm.init_weight_transfer_engine({"init_info": {"master_port": 1}}), "must be empty"),
    ]
    for call, message in calls:
        with pytest.raises(VLLMValidationError, match=message):
            call()
    shared_llm.init_weight_transfer_engine({"init_info": {}})
    shared_llm.shutdown_weight_transfer_engine()


def test_enqueued_requests_are_kept_by_choice(tmp_path: Path) -> None:
    """A request that goes on computes its prompt and its tokens again, with the new weights."""
    tensors = changed(CASE)
    path = saved(CASE, tensors, tmp_path / "new")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=JOBS[0].prompt)
    with tiny_llm(CASE, **SETTINGS) as (llm, _):
        llm.enqueue(prompt, params)
        with pytest.raises(VLLMValidationError, match="1 requests are unfinished"):
            llm.update_weights(tensors)
        for _ in range(6):
            llm.llm_engine.step()
        llm.update_weights(tensors, mode="keep")
        [request] = [*scheduler_of(llm)._waiting]
        num_before = request.num_tokens - len(JOBS[0].prompt)
        assert num_before > 0
        [output] = llm.wait_for_completion(use_tqdm=False)
        scheduler_of(llm).check()
    ids = list(output.outputs[0].token_ids)
    with tiny_llm(path, **SETTINGS) as (llm, _):
        longer = TokensPrompt(prompt_token_ids=[*JOBS[0].prompt, *ids[:num_before]])
        rest = SamplingParams(temperature=0, max_tokens=12 - num_before, ignore_eos=True)
        [expected] = llm.generate(longer, rest, use_tqdm=False)
    assert ids[num_before:] == list(expected.outputs[0].token_ids)


def test_enqueued_requests_end_first_or_are_aborted() -> None:
    tensors = changed(CASE)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=job.prompt) for job in JOBS]
    with tiny_llm(CASE, **SETTINGS) as (llm, _):
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.enqueue(prompts, params)
        for _ in range(6):
            llm.llm_engine.step()
        llm.update_weights(tensors, mode="wait", version=1)
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected, "they ended with the old weights"
        new = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert new != expected
        llm.enqueue(prompts, params)
        for _ in range(6):
            llm.llm_engine.step()
        with pytest.raises(VLLMValidationError, match="mode must be None, 'abort', 'wait' or 'keep'"):
            llm.update_weights(tensors, mode="never")  # type: ignore[arg-type]
        llm.update_weights(dict(read_tensors(CASE)), mode="abort")
        assert llm.wait_for_completion(use_tqdm=False) == []
        again = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert again == expected


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_never_brings_old_weights_back(level: int) -> None:
    tensors = changed(CASE)
    with tiny_llm(CASE, **SETTINGS) as (llm, _):
        llm.update_weights(tensors)
        expected = answers(llm)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            with pytest.raises(RuntimeError, match="has no weights"):
                llm.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]), use_tqdm=False)
            [name] = [each for each in tensors if "embed" in each]
            with pytest.raises(VLLMValidationError, match="must bring all"):
                llm.update_weights({name: tensors[name]})
            llm.update_weights(tensors)
        assert answers(llm) == expected
        llm.sleep(2)
        llm.update_weights(tensors)  # while it sleeps
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert answers(llm) == expected


def test_a_folder_of_blocks_is_left_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"kv_offloading_size": 0.01, "kv_cache_folder": str(tmp_path / "blocks")}
    tensors = changed(CASE)
    with tiny_llm(CASE, **settings) as (llm, _):
        before = answers(llm)
    expected = expected_of(saved(CASE, tensors, tmp_path / "new"))
    for _ in range(2):
        with tiny_llm(CASE, **settings) as (llm, _):
            assert answers(llm) == before, "no block of other weights was found"
            llm.update_weights(tensors)
            assert answers(llm) == expected


def test_blocks_on_the_host_are_forgotten(tmp_path: Path) -> None:
    """Requests that wait for old blocks when the weights change compute their prompts instead."""
    settings: dict[str, Any] = test_kv_offloading.ARGUMENTS
    jobs = test_kv_offloading.make_jobs()
    updates = [changed(CASE, seed) for seed in range(3)]
    expected = []
    for number, tensors in enumerate(updates):
        path = saved(CASE, tensors, tmp_path / str(number))
        with tiny_llm(path, **settings | {"kv_offloading_size": None}) as (llm, _):
            expected.append([bits(output) for output in run_together(llm, jobs)])
    num_waiting = 0
    with tiny_llm(CASE, **settings) as (llm, scheduler):
        for number in [0, 1, 2, 0]:
            llm.update_weights(updates[number])
            for _ in range(2):
                outputs = run_together(llm, jobs)
                assert [bits(output) for output in outputs] == expected[number]
            num_fetches = scheduler.tiers.counts.num_fetches
            for job in jobs:
                llm.enqueue(TokensPrompt(prompt_token_ids=job.prompt), job.params)
            llm.llm_engine.step()
            num_waiting += len(scheduler.tiers._pending)
            other = (number + 1) % len(updates)
            llm.update_weights(updates[other], mode="keep")
            waiting = [request.token_ids.tolist() for request in scheduler._waiting]
            is_new = [job.prompt in waiting for job in jobs]  # without a token of the old weights
            assert any(is_new)
            outputs = llm.wait_for_completion(use_tqdm=False)
            for output, answer, was_new in zip(outputs, expected[other], is_new, strict=True):
                assert bits(output) == answer or not was_new
        scheduler.check()
        assert num_fetches > 0, "nothing came back from the host"
    assert num_waiting > 0, "no request waited for blocks"


def test_adapters_stay(tmp_path: Path) -> None:
    """More adapters than slots: some are in a slot during the update, others in the host's store."""
    adapters = [adapter_data.request(name, CASE) for name in adapter_data.names_of(CASE)[:3]]
    prompts = [adapter_data.prompt_of(CASE)] * len(adapters)
    settings: dict[str, Any] = {"max_loras": 2, "max_cpu_loras": 4} | adapter_data.SETTINGS

    def logprobs(llm: LLM) -> list[Any]:
        outputs = adapter_data.generate(llm, prompts, adapters)
        return [adapter_data.logprobs_of(output).tolist() for output in outputs]

    tensors = changed(CASE)
    with LLM(str(saved(CASE, tensors, tmp_path / "new")), **settings) as llm:
        expected = logprobs(llm)
    with LLM(str(folder(CASE)), **settings) as llm:
        before = logprobs(llm)
        assert before != expected
        llm.update_weights(tensors)
        assert logprobs(llm) == expected
        llm.update_weights(dict(read_tensors(CASE)))
        assert logprobs(llm) == before


def test_a_draft_head(tmp_path: Path) -> None:
    """With its new weights it guesses what a new engine's head guesses; the model's own update leaves its tokens."""
    heads = Path(head_config("eagle3")["model"])
    rng = np.random.default_rng(0)
    head = {
        name: (array * (1 + rng.standard_normal(array.shape))).astype(array.dtype)
        if jnp.issubdtype(array.dtype, jnp.floating)
        else array
        for name, array in load_file(heads / "model.safetensors").items()
    }
    shutil.copytree(heads, tmp_path / "head")
    save_file(head, tmp_path / "head" / "model.safetensors")
    tensors = changed("gemma2")
    path = saved("gemma2", tensors, tmp_path / "new")

    def guessed(llm: LLM, scheduler: Any) -> Any:
        guesses = Guesses(scheduler)
        return answers(llm), dict(guesses.seen)

    config = head_config("eagle3")
    with tiny_llm(path, **SETTINGS, speculative_config=config | {"model": str(tmp_path / "head")}) as (llm, scheduler):
        expected = guessed(llm, scheduler)
    with tiny_llm("gemma2", **SETTINGS, speculative_config=config) as (llm, scheduler):
        before = guessed(llm, scheduler)
        llm.start_draft_weight_update()
        llm.update_weights(head)
        llm.finish_weight_update()
        of_head = guessed(llm, scheduler)
        assert of_head[0] == before[0]
        assert of_head[1] != before[1]
        llm.update_weights(tensors)
        assert guessed(llm, scheduler) == expected


def test_two_devices() -> None:
    """Tensors and trees are resharded to the parts that the devices hold."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "tests.e2e.weight_runs"]
    done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_config_of_the_cases_is_what_the_tests_say() -> None:
    config = json.loads((folder(CASE) / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"]

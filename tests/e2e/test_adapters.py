"""LoRA adapters through `LLM`: each gives what HF gives with it merged into the weights by PEFT, whoever else runs."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.sampling_params import BeamSearchParams
from tests.e2e.adapter_data import (
    ADAPTERS,
    CASES,
    SETTINGS,
    generate,
    golden_of,
    logprobs_of,
    names_of,
    prompt_of,
    request,
)
from tests.e2e.inside import core_of
from tests.loading.files import safetensors_bytes
from tests.models.tiny import BLOCK_SIZE, folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

CASE = "llama3_tied"
NAMES = names_of(CASE)
TOLERANCE = 1e-4
NUM_SLOTS = 3
"""The number of adapter slots, fewer than there are adapters."""


def own(name: str, **fields: Any) -> LoRARequest:
    """Return the request for an adapter of the model that most tests run."""
    return request(name, CASE, **fields)


def check(output: RequestOutput, name: str, case: str = CASE) -> None:
    """Compare an answer with HF's."""
    golden = golden_of(name, case)
    assert output.outputs[0].token_ids == golden.tokens
    np.testing.assert_allclose(logprobs_of(output), golden.logprobs, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(folder(CASE)), max_loras=NUM_SLOTS, max_cpu_loras=len(NAMES), **SETTINGS) as llm:
        yield llm


def test_eight_adapters_in_one_batch_give_what_merged_weights_give_and_what_each_gives_alone(llm: LLM):
    adapters = [None, *map(own, NAMES), own(NAMES[0])]
    assert len(NAMES) == 8 > NUM_SLOTS
    prompt = prompt_of(CASE)
    prompts = [prompt] * 9 + [prompt[:7]]
    together = generate(llm, prompts, adapters)
    for name, output in zip(NAMES, together[1:], strict=False):
        check(output, name)
        assert output.lora_request == own(name)
    num_compiled = core_of(llm).num_compiled
    for ids, adapter, output in zip(prompts, adapters, together, strict=True):
        llm.reset_prefix_cache()
        [alone] = generate(llm, [ids], [adapter])
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        np.testing.assert_array_equal(logprobs_of(alone), logprobs_of(output))
    assert core_of(llm).num_compiled == num_compiled, "a load has compiled something"


def test_without_an_adapter_a_request_gets_what_an_engine_without_adapters_gives(llm: LLM):
    prompt = prompt_of(CASE)
    with_others, _ = generate(llm, [prompt] * 2, [None, own("all")])
    settings: dict[str, Any] = SETTINGS | {"enable_lora": False}
    with LLM(str(folder(CASE)), **settings) as plain:
        [alone] = generate(plain, [prompt], [None])
        with pytest.raises(VLLMValidationError, match="enable_lora=True"):
            generate(plain, [prompt], [own("all")])
    np.testing.assert_array_equal(logprobs_of(with_others), logprobs_of(alone))


def test_the_prefix_cache_is_an_adapters_own(llm: LLM):
    prompt = prompt_of(CASE)
    llm.reset_prefix_cache()
    [first] = generate(llm, [prompt], [own("all")])
    [other] = generate(llm, [prompt], [own("mlp")])
    [again] = generate(llm, [prompt], [own("all")])
    assert [first.num_cached_tokens, other.num_cached_tokens, again.num_cached_tokens] == [0, 0, BLOCK_SIZE]
    np.testing.assert_array_equal(logprobs_of(first), logprobs_of(again))
    check(other, "mlp")


def test_an_adapter_is_read_again_when_asked(llm: LLM, tmp_path: Path):
    path, number = tmp_path / "adapter", len(NAMES) + 1
    shutil.copytree(ADAPTERS / CASE / "all", path)
    named = LoRARequest("mine", number, str(path))
    check(generate(llm, [prompt_of(CASE)], [named])[0], "all")
    shutil.rmtree(path)
    shutil.copytree(ADAPTERS / CASE / "mlp", path)
    check(generate(llm, [prompt_of(CASE)], [named])[0], "all")
    check(generate(llm, [prompt_of(CASE)], [LoRARequest("mine", number, str(path), load_inplace=True)])[0], "mlp")
    check(generate(llm, [prompt_of(CASE)], [named])[0], "mlp")


O_PROJ = "base_model.model.model.layers.0.self_attn.o_proj"


def break_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | changes))


def test_beams_of_an_adapter_are_searched_for(llm: LLM):
    prompt, golden = TokensPrompt(prompt_token_ids=prompt_of(CASE)), golden_of("all", CASE)
    greedy = BeamSearchParams(beam_width=1, max_tokens=len(golden.tokens), ignore_eos=True)
    adapted, plain = llm.beam_search([prompt] * 2, greedy, lora_request=[own("all"), None])
    [best], [other] = adapted.sequences, plain.sequences
    assert best.tokens[len(prompt_of(CASE)) :] == golden.tokens != other.tokens[len(prompt_of(CASE)) :]
    assert (best.lora_request, other.lora_request) == (own("all"), None)


def test_an_asynchronous_engine_finds_the_same_beams(llm: LLM, tmp_path: Path):
    prompt, params = TokensPrompt(prompt_token_ids=prompt_of(CASE)), BeamSearchParams(beam_width=3, max_tokens=6)
    expected = llm.beam_search([prompt] * 2, params, lora_request=[own("all"), None])

    async def search(engine: AsyncLLM, adapter: LoRARequest | None) -> RequestOutput:
        return await anext(engine.beam_search(prompt, f"search {adapter}", params, adapter))

    async def run() -> list[RequestOutput]:
        args = AsyncEngineArgs(str(folder(CASE)), **SETTINGS)
        with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as engine:
            with pytest.raises(VLLMValidationError, match="no such folder"):
                await search(engine, LoRARequest("none", 99, str(tmp_path / "none")))
            wrong: Any = "all"
            with pytest.raises(VLLMValidationError, match="LoRARequest"):
                await search(engine, wrong)
            return list(await asyncio.gather(search(engine, own("all")), search(engine, None)))

    outputs = asyncio.run(run())
    for output, searched in zip(outputs, expected, strict=True):
        assert [each.token_ids for each in output.outputs] == [
            each.tokens[len(prompt_of(CASE)) :] for each in searched.sequences
        ]
    assert [output.lora_request for output in outputs] == [own("all"), None]
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


BROKEN = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "there is no adapter_model"),
    "cut short": (
        lambda path: (path / "adapter_model.safetensors").write_bytes(
            (path / "adapter_model.safetensors").read_bytes()[:-4]
        ),
        "cut short",
    ),
    "no JSON": (lambda path: (path / "adapter_config.json").write_text("{"), "cannot be read"),
    "another method": (lambda path: break_config(path, peft_type="IA3"), "peft_type='IA3'"),
    "DoRA": (lambda path: break_config(path, use_dora=True), "use_dora"),
    "another rank": (lambda path: break_config(path, r=3), "has rank 4, and adapter_config.json says 3"),
    "no regular expression": (
        lambda path: break_config(path, alpha_pattern={"q_proj(": 4}),
        "no regular expression",
    ),
    "whole modules": (lambda path: break_config(path, modules_to_save=["lm_head"]), "modules_to_save"),
    "another model": (
        lambda path: shutil.copytree(ADAPTERS / "gpt2" / "all", path, dirs_exist_ok=True),
        "no linear layer of that name",
    ),
    "other sizes": (
        lambda path: (path / "adapter_model.safetensors").write_bytes(
            safetensors_bytes({f"{O_PROJ}.lora_A.weight": np.ones((4, 6)), f"{O_PROJ}.lora_B.weight": np.ones((5, 4))})
        ),
        "is for 6 inputs and 5 outputs, and in this model it has",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_bad_adapter_ends_its_own_request_with_an_error(llm: LLM, tmp_path: Path, how: str):
    path = tmp_path / "adapter"
    shutil.copytree(ADAPTERS / CASE / "all", path)
    spoil, message = BROKEN[how]
    spoil(path)
    bad = LoRARequest("bad", 100 + list(BROKEN).index(how), str(path))
    good, failed = generate(llm, [prompt_of(CASE)] * 2, [own("all"), bad])
    check(good, "all")
    assert failed.outputs[0].finish_reason == "error"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.outputs[0].stop_reason)


def test_requests_name_adapters_one_for_all_or_one_each(llm: LLM):
    params = SamplingParams(max_tokens=1, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=[5, 6])] * 2
    outputs = llm.generate(prompts, params, lora_request=own("all"), use_tqdm=False)
    assert [output.lora_request for output in outputs] == [own("all")] * 2
    with pytest.raises(VLLMValidationError, match="lora_request"):
        llm.generate(prompts, params, lora_request=[own("all")], use_tqdm=False)
    wrong: Any = "all"
    with pytest.raises(VLLMValidationError, match="LoRARequest"):
        llm.generate(prompts, params, lora_request=wrong, use_tqdm=False)
    with pytest.raises(ValueError, match="lora_int_id"):
        LoRARequest("none", 0, "somewhere")


@pytest.mark.families
@pytest.mark.parametrize("case", [case for case in CASES if case != CASE])
def test_other_families_give_what_merged_weights_give(case: str):
    with LLM(str(folder(case)), **SETTINGS) as llm:
        outputs = generate(llm, [prompt_of(case)] * 2, [request("all", case), None])
    check(outputs[0], "all", case)
    assert np.abs(logprobs_of(outputs[0]) - logprobs_of(outputs[1])).max() > 0.1


def test_adapters_are_added_to_quantized_weights():
    """What int8 rounds off the weights is little beside what an adapter adds."""
    with LLM(str(folder(CASE)), quantization="int8", **SETTINGS) as llm:
        adapted, plain = map(logprobs_of, generate(llm, [prompt_of(CASE)] * 2, [own("all"), None]))
    assert np.abs(adapted[0] - golden_of("all", CASE).logprobs[0]).max() < 0.5
    assert np.abs(adapted[0] - plain[0]).max() > 5


def test_metrics_name_the_adapters_of_requests(llm: LLM):
    engine, name = llm.llm_engine, own(NAMES[1]).lora_name

    def shown() -> tuple[str, str]:
        [info] = [metric for metric in llm.get_metrics() if metric.name == "vllm:lora_requests_info"]
        assert info.labels["max_lora"] == str(NUM_SLOTS)
        return info.labels["waiting_lora_adapters"], info.labels["running_lora_adapters"]

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("r", TokensPrompt(prompt_token_ids=prompt_of(CASE)), params, lora_request=own(NAMES[1]))
    seen = [shown()]
    while engine.has_unfinished_requests():
        engine.step()
        seen.append(shown())
    assert (seen[0], seen[-2], seen[-1]) == ((name, ""), ("", name), ("", ""))


def test_adapters_are_added_listed_pinned_and_removed(llm: LLM, tmp_path: Path):
    engine, number = llm.llm_engine, 77
    assert engine.add_lora(LoRARequest("mine", number, str(ADAPTERS / CASE / "all")))
    assert number in engine.list_loras()
    assert engine.pin_lora(number)
    assert engine.remove_lora(number)
    assert number not in engine.list_loras()
    assert not engine.remove_lora(number)
    assert not engine.pin_lora(number)
    with pytest.raises(VLLMValidationError, match="no such folder"):
        engine.add_lora(LoRARequest("none", number, str(tmp_path / "none")))
    with pytest.raises(VLLMValidationError, match="lora_id"):
        engine.pin_lora(0)
    none: Any = None
    with pytest.raises(VLLMValidationError, match="LoRARequest"):
        engine.add_lora(none)

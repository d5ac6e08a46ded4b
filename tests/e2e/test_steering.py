"""Steering through `LLM`: each vector gives what HF gives with hooks that add it, whoever else runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.e2e import adapter_data
from tests.e2e.guessing import head_config
from tests.loading.files import safetensors_bytes
from tests.models.heads import model_folder
from tests.models.tiny import BLOCK_SIZE, folder
from tests.quick import QUICK_FLAGS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

DATA = Path(__file__).parents[1] / "data" / "steering"
CASES = tuple(sorted(path.name for path in DATA.iterdir()))
CASE = "llama3_tied"
STEERED: dict[str, dict[str, Any]] = {
    "all": {"name": "all", "scale": 0.75},
    "one": {"name": "one", "scale": -2},
}
"""What requests ask for, by the golden's name."""
TOLERANCE = 1e-4
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": BLOCK_SIZE,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 65,
    "max_logprobs": -1,
    "enforce_eager": True,
    "batch_invariant": True,
}
WIDTH, LAYERS = 48, 2
"""The sizes of the case."""


def start(case: str = CASE, **settings: Any) -> LLM:
    vectors: dict[str, Any] = {"steering": str(DATA / case / "vectors.safetensors")}
    return LLM(str(folder(case)), **(SETTINGS | vectors | settings))


def prompt_of(case: str = CASE) -> list[int]:
    with np.load(DATA / case / "golden.npz") as arrays:
        return arrays["prompt"].tolist()


def generate(llm: LLM, prompts: Sequence[list[int]], asked: Sequence[Any], **fields: Any) -> list[RequestOutput]:
    """Continue prompts greedily, with log-probabilities of the whole vocabulary; `asked` has each one's steering."""
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": -1, "ignore_eos": True} | fields
    params = [
        SamplingParams(detokenize=False, extra_args=None if each is None else {"steering": each}, **settings)
        for each in asked
    ]
    return llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)


def logprobs_of(output: RequestOutput, index: int = 0) -> np.ndarray:
    """Return the log-probabilities of the whole vocabulary, [tokens, v]."""
    steps = output.outputs[index].logprobs
    assert steps is not None
    return np.array([[step[token].logprob for token in range(len(step))] for step in steps])


def check(output: RequestOutput, name: str, case: str = CASE, index: int = 0) -> None:
    """Compare an output with HF's."""
    with np.load(DATA / case / "golden.npz") as arrays:
        assert list(output.outputs[index].token_ids) == arrays[f"tokens_{name}"].tolist()
        np.testing.assert_allclose(logprobs_of(output, index), arrays[f"logprobs_{name}"], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with start() as llm:
        yield llm


@pytest.mark.parametrize("case", CASES)
def test_vectors_give_what_hf_gives_with_hooks(case: str):
    with start(case) as llm:
        outputs = generate(llm, [prompt_of(case)] * 3, [None, *STEERED.values()])
        for name, output in zip(STEERED, outputs[1:], strict=True):
            check(output, name, case)
        assert not np.array_equal(logprobs_of(outputs[0]), logprobs_of(outputs[1])), "the vectors do nothing"


def test_steering_changes_no_bit_of_other_requests(llm: LLM):
    prompts = [prompt_of(), prompt_of()[:7], prompt_of()[3:], prompt_of()]
    asked = [None, STEERED["all"], None, STEERED["one"]]
    together = generate(llm, prompts, asked)
    with LLM(str(folder(CASE)), **SETTINGS) as plain:
        expected = generate(plain, [prompts[0], prompts[2]], [None, None])
    for ours, theirs in zip([together[0], together[2]], expected, strict=True):
        np.testing.assert_array_equal(logprobs_of(ours), logprobs_of(theirs))
    for prompt, steering, output in zip(prompts, asked, together, strict=True):
        llm.reset_prefix_cache()
        [alone] = generate(llm, [prompt], [steering])
        np.testing.assert_array_equal(logprobs_of(alone), logprobs_of(output))


def test_a_vector_and_a_scale_have_a_prefix_cache_of_their_own(llm: LLM):
    llm.reset_prefix_cache()
    stronger = {"name": "all", "scale": 0.8}
    asked = [None, STEERED["all"], STEERED["one"], stronger, {"name": "all", "scale": 0}, STEERED["all"], stronger]
    outputs = [generate(llm, [prompt_of()], [each])[0] for each in asked]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0, BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE]
    check(outputs[5], "all")
    np.testing.assert_array_equal(logprobs_of(outputs[4]), logprobs_of(outputs[0]))
    np.testing.assert_array_equal(logprobs_of(outputs[6]), logprobs_of(outputs[3]))


def test_all_outputs_of_a_request_are_steered_and_its_prompt_is_scored_so(llm: LLM):
    [forked] = generate(llm, [prompt_of()], [STEERED["one"]], n=3, prompt_logprobs=0)
    for index in range(3):
        check(forked, "one", index=index)
    [plain] = generate(llm, [prompt_of()], [None], prompt_logprobs=0)
    ours, theirs = (
        [each.logprob for step in (output.prompt_logprobs or [])[1:] for each in (step or {}).values()]
        for output in (forked, plain)
    )
    assert len(ours) == len(prompt_of()) - 1
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) > 0.1


GUESSING: dict[str, tuple[Path, dict[str, Any]]] = {
    "ngram": (folder("llama2"), {"method": "ngram", "num_speculative_tokens": 4}),
    "draft model": (folder("llama2"), {"model": str(folder("llama2")), "num_speculative_tokens": 2}),
    "eagle3": (model_folder("eagle3"), head_config("eagle3")),
    "recurrent": (folder("qwen3_next"), {"method": "ngram", "num_speculative_tokens": 4}),
}


@pytest.mark.parametrize("kind", GUESSING)
def test_guesses_are_checked_with_steering(tmp_path: Path, kind: str):
    model, config = GUESSING[kind]
    asked = [{"name": "drawn"}, None, {"name": "drawn", "scale": -0.5}]
    settings: dict[str, Any] = SETTINGS | {"steering": draw_vectors(tmp_path / "vectors", model, seed=1)}
    repeated = prompt_of() + prompt_of()
    with LLM(str(model), **settings, speculative_config=config) as guessing, LLM(str(model), **settings) as plain:
        ours, theirs = (generate(llm, [repeated] * 3, asked, max_tokens=24) for llm in (guessing, plain))
    for output, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(logprobs_of(output), logprobs_of(expected))
    assert not np.array_equal(logprobs_of(ours[0]), logprobs_of(ours[1]))


def draw_vectors(path: Path, model: Path, seed: int) -> str:
    """Write a vector for all layers of a model."""
    config, rng = json.loads((model / "config.json").read_text(encoding="utf-8")), np.random.default_rng(seed)
    names = [f"drawn.layers.{layer}" for layer in range(config["num_hidden_layers"])]
    path.write_bytes(safetensors_bytes({name: rng.normal(size=config["hidden_size"]).astype("f") for name in names}))
    return str(path)


def test_adapters_are_steered_and_keep_to_themselves():
    adapter = adapter_data.request("all", CASE)
    with start(enable_lora=True, max_lora_rank=8) as llm:
        prompt = adapter_data.prompt_of(CASE)
        both = [SamplingParams(temperature=0, max_tokens=8, logprobs=-1, ignore_eos=True, detokenize=False)] * 4
        for index, steering in enumerate([STEERED["all"], None, STEERED["all"], {"name": "all", "scale": 0}]):
            both[index] = both[index].clone()
            both[index].extra_args = {"steering": steering} if steering else None
        adapters = [adapter, adapter, None, adapter]
        asked = [TokensPrompt(prompt_token_ids=prompt)] * 4
        outputs = llm.generate(asked, both, lora_request=adapters, use_tqdm=False)
        steered, adapted, alone, unmoved = map(logprobs_of, outputs)
        np.testing.assert_allclose(adapted, adapter_data.golden_of("all", CASE).logprobs[:8], rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(unmoved, adapted)
        assert not any(np.array_equal(steered, other) for other in (adapted, alone))
        llm.reset_prefix_cache()
        [again] = llm.generate(asked[:1], both[0], lora_request=adapter, use_tqdm=False)
        np.testing.assert_array_equal(logprobs_of(again), steered)


def test_blocks_in_a_folder_go_by_what_a_vector_is_not_by_its_name(tmp_path: Path):
    def run(seed: int) -> RequestOutput:
        path = draw_vectors(tmp_path / "vectors", folder(CASE), seed)
        with start(steering=path, kv_offloading_size=0.01, kv_cache_folder=str(tmp_path / "kept")) as llm:
            return generate(llm, [prompt_of()], [{"name": "drawn"}])[0]

    first, other, again = run(1), run(2), run(1)
    assert [output.num_cached_tokens for output in (first, other, again)] == [0, 0, BLOCK_SIZE]
    np.testing.assert_array_equal(logprobs_of(again), logprobs_of(first))
    assert not np.array_equal(logprobs_of(other), logprobs_of(first))


def test_vectors_stay_when_the_engine_sleeps(llm: LLM):
    llm.sleep(level=1)
    llm.wake_up()
    check(generate(llm, [prompt_of()], [STEERED["all"]])[0], "all")


def test_an_engine_in_a_process_of_its_own_knows_the_vectors():
    path = str(DATA / CASE / "vectors.safetensors")
    args = AsyncEngineArgs(model=str(folder(CASE)), **SETTINGS, steering=path)

    async def run() -> None:
        async with AsyncLLM.from_engine_args(args) as engine:
            params = SamplingParams(
                temperature=0, max_tokens=8, logprobs=-1, ignore_eos=True, detokenize=False,
                extra_args={"steering": STEERED["one"]},
            )  # fmt: skip
            *_, last = [each async for each in engine.generate({"prompt_token_ids": prompt_of()}, params, "a")]
            check(last, "one")

    asyncio.run(run())


SPREAD = """
import jax
from tests.e2e.test_steering import STEERED, check, generate, prompt_of, start
with start("gemma3", tensor_parallel_size=2) as llm:
    assert len(jax.devices()) == 2
    outputs = generate(llm, [prompt_of("gemma3")] * 3, [None, *STEERED.values()])
for name, output in zip(STEERED, outputs[1:]):
    check(output, name, "gemma3")
"""


def test_two_devices_steer_alike(repository: Path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2 {QUICK_FLAGS}"
    command = [sys.executable, "-c", SPREAD]
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown": ({"name": "sad"}, "no vector 'sad', only 'all', 'one'"),
    "no dict": ("all", "must be a dict with name"),
    "no name": ({"scale": 1.0}, "must be a dict with name"),
    "too much": ({"name": "all", "layers": [1]}, "must be a dict with name"),
    "no string": ({"name": 3}, "no vector 3"),
    "a list": ({"name": ["all"]}, "no vector"),
    "nan": ({"name": "all", "scale": float("nan")}, "scale"),
    "huge": ({"name": "all", "scale": 1001}, "scale"),
    "text": ({"name": "all", "scale": "1"}, "scale"),
    "null": (None, "must be a dict with name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_requests_are_refused(llm: LLM, name: str):
    value, message = REFUSED[name]
    with pytest.raises(VLLMValidationError, match=message) as error:
        llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(extra_args={"steering": value}), use_tqdm=False)
    assert error.value.parameter == "extra_args"


def test_an_engine_without_vectors_refuses_them():
    with LLM(str(folder(CASE)), **SETTINGS) as plain, pytest.raises(VLLMValidationError, match="steering=FILE"):
        generate(plain, [[1, 2]], [STEERED["all"]])


ROW = np.ones(WIDTH, np.float32)
BAD_FILES: dict[str, tuple[Any, str]] = {
    "names": ({"happy": ROW}, "NAME.layers.LAYER"),
    "layer": ({f"happy.layers.{LAYERS}": ROW}, f"layers 0 to {LAYERS - 1}"),
    "padded layer": ({"happy.layers.01": ROW}, "NAME.layers.LAYER"),
    "width": ({"happy.layers.0": ROW[1:]}, f"\\[{WIDTH}\\]"),
    "axes": ({"happy.layers.0": ROW[None]}, f"\\[{WIDTH}\\]"),
    "dtype": ({"happy.layers.0": ROW.astype(np.int32)}, "float32"),
    "infinite": ({"happy.layers.0": ROW * np.inf}, "not within"),
    "nan": ({"happy.layers.0": ROW * np.nan}, "not within"),
    "huge": ({"happy.layers.0": ROW * 2e6}, "not within"),
    "none": ({}, "1 to 1024 vectors"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_before_the_weights_are_read(tmp_path: Path, name: str):
    tensors, message = BAD_FILES[name]
    path = tmp_path / "vectors.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    with pytest.raises(VLLMValidationError, match=message) as error:
        start(steering=str(path))
    assert error.value.parameter == "steering"


def test_files_that_are_none_and_engines_that_cannot_steer_are_refused(tmp_path: Path):
    (tmp_path / "broken").write_bytes(b"nothing")
    for path in ("broken", "missing", "."):
        with pytest.raises(VLLMValidationError, match="cannot be read"):
            start(steering=str(tmp_path / path))
    with pytest.raises(VLLMValidationError, match="decoders that generate"):
        start(runner="pooling")

    def tilt(logits_sv: Any, state: Any) -> Any:
        return logits_sv + state.extra_args["steering"][:, None]

    tilt.extra_args = {"steering": 0.0}  # type: ignore[attr-defined]
    with pytest.raises(VLLMValidationError, match="logits processor"):
        start(logits_processors=[tilt])

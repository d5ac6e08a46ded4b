"""Models that pool, through `LLM`: what HF gives, whatever else is in the step, and beside requests that generate."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, PoolingParams, SamplingParams
from jaxllm.engine.front.metrics import Counter, Histogram
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from tests.e2e.inside import core_of
from tests.models.pooled import PooledGolden, read_pooled_goldens
from tests.models.running import build_model
from tests.models.tiny import POOLING_CASES, folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

TOLERANCE = 1e-4
RAW = {"use_activation": False}


def make_llm(case: str, num_tokens: int, **settings: Any) -> LLM:
    """Return an engine of a tiny checkpoint whose steps all have one size."""
    defaults: dict[str, Any] = {"max_model_len": num_tokens, "dtype": "float32", "max_num_seqs": 16}
    return LLM(
        str(folder(case)),
        **(defaults | settings),
        skip_tokenizer_init=True,
        max_num_batched_tokens=num_tokens,
        cudagraph_capture_sizes=[num_tokens],
        enforce_eager=True,
        use_tqdm_on_load=False,
    )


def as_prompt(golden: PooledGolden) -> Any:
    return {"prompt_token_ids": golden.tokens.tolist(), "token_type_ids": golden.types.tolist()}


def encode(llm: LLM, prompts: list[Any], task: str, **params: Any) -> list[np.ndarray]:
    """Return the result of each prompt in a task."""
    outputs = llm.encode(prompts, PoolingParams(**params), pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


@pytest.mark.parametrize("case", POOLING_CASES)
def test_outputs_are_hfs(case: str) -> None:
    """Decoders take their prompts in chunks, which encoders cannot."""
    model = build_model(case).config
    assert model.pooling is not None
    is_decoder = all(layer.causal for layer in model.layers) and model.pooling.kind == "LAST"
    goldens = read_pooled_goldens(case)
    prompts = [as_prompt(golden) for golden in goldens]
    longest = max(len(golden.tokens) for golden in goldens)
    settings: dict[str, Any] = {"max_model_len": longest} if is_decoder else {}
    with make_llm(case, 16 if is_decoder else 48, **settings) as llm:
        assert longest > 16
        task = next(each for each in ("token_embed", "classify", "token_classify") if each in model.pooling.tasks)
        for got, golden in zip(encode(llm, prompts, task, **RAW), goldens, strict=True):
            np.testing.assert_allclose(got, golden.output, rtol=0, atol=TOLERANCE)
        if "embed" not in model.pooling.tasks:
            return
        kind = model.pooling.kind
        of_texts = [{"CLS": g.output[0], "LAST": g.output[-1], "MEAN": g.output.mean(0)}[kind] for g in goldens]
        for got, state in zip(encode(llm, prompts, "embed", **RAW), of_texts, strict=True):
            np.testing.assert_allclose(got, state, rtol=0, atol=TOLERANCE)
        for output, state in zip(llm.embed(prompts, use_tqdm=False), of_texts, strict=True):
            np.testing.assert_allclose(output.outputs.embedding, state / np.linalg.norm(state), rtol=0, atol=TOLERANCE)


def random_prompts(count: int, longest: int, seed: int = 0) -> list[Any]:
    """Return prompts of all lengths; half of them begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 250) for _ in range(longest)]
    lengths = [1 + i * (longest - 1) // (count - 1) for i in range(count)]
    rng.shuffle(lengths)
    return [
        {"prompt_token_ids": (shared[: length // 2] if i % 2 else []) + [rng.randrange(3, 250) for _ in range(length)]}
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("case", "dtype", "task"),
    [
        ("bert", "float32", "embed"),
        ("bert", "bfloat16", "token_embed"),
        ("modernbert", "float32", "embed"),
        ("nomic", "float32", "embed"),
        ("gte", "bfloat16", "token_embed"),
        ("deberta", "float32", "embed"),
        ("deberta_tokens", "bfloat16", "token_classify"),
        ("embedding_gemma", "bfloat16", "embed"),
        ("llama_classifier", "float32", "classify"),
    ],
)
def test_alone_and_among_64_to_the_bit(case: str, dtype: str, task: str) -> None:
    """MEAN of an encoder, windows both ways, and a decoder whose prompts are cut into chunks and found in the cache."""
    prompts = random_prompts(64, 40)
    pooler = {"pooling_type": "MEAN"} if case == "bert" else None
    with make_llm(case, 64, dtype=dtype, batch_invariant=True, pooler_config=pooler) as llm:
        together = encode(llm, prompts, task)
        assert core_of(llm)._scheduler.stats().num_steps < len(prompts) / 2
        for prompt, among in zip(prompts, together, strict=True):
            [alone] = encode(llm, [prompt], task)
            np.testing.assert_array_equal(alone, among)
        assert len({row.tobytes() for row in together}) == len(prompts)


@pytest.fixture(scope="module")
def decoder() -> Iterator[LLM]:
    """A decoder that generates and embeds."""
    with make_llm("qwen3", 16, max_model_len=48, runner="generate", convert="embed") as llm:
        yield llm


def test_one_engine_generates_and_embeds(decoder: LLM) -> None:
    """Steps are of one kind each, and no request waits for all of the other kind."""
    prompts = random_prompts(12, 20, seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    embedded = encode(decoder, prompts, "embed")
    generated = [output.outputs[0].token_ids for output in decoder.generate(prompts, params, use_tqdm=False)]
    engine = decoder.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"generate {number}", prompt, params)
        engine.add_request(f"embed {number}", prompt, PoolingParams(task="embed"))
    ended: list[str] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            kind, number = output.request_id.split()
            if kind == "embed":
                np.testing.assert_array_equal(output.outputs.data, embedded[int(number)])
            elif output.finished:
                assert output.outputs[0].token_ids == generated[int(number)]
            ended += [kind] * output.finished
    assert len(ended) == 2 * len(prompts)
    assert "embed" in ended[: len(prompts)]
    assert "generate" in ended[: len(prompts)]


def test_a_request_that_is_aborted_leaves_nothing(decoder: LLM) -> None:
    engine = decoder.llm_engine
    for number, prompt in enumerate(random_prompts(6, 20, seed=2)):
        engine.add_request(str(number), prompt, PoolingParams(task="token_embed"))
    engine.step()
    engine.abort_request([str(number) for number in range(6)])
    while engine.has_unfinished_requests():
        assert not engine.step()
    decoder.embed(random_prompts(1 + 1, 5), use_tqdm=False)
    assert core_of(decoder)._scheduler.stats().num_blocks_in_use == 0


def test_what_cannot_be_is_refused(decoder: LLM) -> None:
    too_long: Any = {"prompt_token_ids": [5] * 49}
    refused: list[tuple[Any, str]] = [
        ([], "cannot be empty"),
        ({"prompt_token_ids": []}, "cannot be empty"),
        (too_long, "maximum context length is 48 tokens"),
        ({"prompt_token_ids": [5, 6], "token_type_ids": [1]}, "token_type_ids"),
        ({"prompt_token_ids": [5, 6], "token_type_ids": [1, 0]}, "token_type_ids"),
        ({"prompt_token_ids": [5, 6], "token_type_ids": [0, 1]}, "tells no texts apart"),
        ({"prompt_token_ids": [10**6]}, "out of vocabulary"),
        ("a text", "skip_tokenizer_init"),
    ]
    for prompt, words in refused:
        with pytest.raises(VLLMValidationError, match=words):
            decoder.embed([prompt, {"prompt_token_ids": [5]}], use_tqdm=False)
    cut = {"truncate_prompt_tokens": -1}
    [whole] = decoder.embed([too_long], tokenization_kwargs=cut, use_tqdm=False)
    assert len(whole.prompt_token_ids) == 48
    with pytest.raises(VLLMValidationError, match="Classification API is not supported by this model"):
        decoder.classify([{"prompt_token_ids": [5]}])
    with pytest.raises(VLLMValidationError, match="pooling_task required"):
        decoder.encode([{"prompt_token_ids": [5]}])
    with pytest.raises(VLLMValidationError, match="does not support Matryoshka"):
        decoder.embed([{"prompt_token_ids": [5]}], pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(VLLMValidationError, match="lengths of prompts"):
        decoder.embed([[5], [6]], pooling_params=[PoolingParams()])


def test_what_is_pooled_is_counted_and_timed() -> None:
    with make_llm("bert", 48, disable_log_stats=False) as llm:
        llm.embed([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [5] * 20}], use_tqdm=False)
        metrics = llm.get_metrics()
    assert [each.value for each in metrics if isinstance(each, Counter) and each.name == "vllm:prompt_tokens"] == [23]
    counts = {each.name.removeprefix("vllm:"): each.count for each in metrics if isinstance(each, Histogram)}
    assert counts["request_queue_time_seconds"] == counts["request_prefill_time_seconds"] == 2
    assert counts["e2e_request_latency_seconds"] == counts["time_to_first_token_seconds"] == 2
    assert counts["request_decode_time_seconds"] == 0


def test_an_encoder_does_not_generate() -> None:
    with make_llm("bert", 48) as llm:
        with pytest.raises(VLLMValidationError, match=r"LLM\.generate\(\) is only supported for generative models"):
            llm.generate([{"prompt_token_ids": [5]}])
        assert llm.llm_engine.get_supported_tasks() == ("embed", "token_embed")


def test_attention_by_distances_has_no_cache(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineArgs(str(folder("deberta"))).create_engine_config()
    [group] = config.kv_groups
    assert group.attention.pool_spec(group.num_layers, 9) == ()
    assert "attention runs in plain XLA, not in the cpu's own kernels: its scores depend on distances" in caplog.text


def test_outputs_that_are_no_numbers_are_errors(tmp_path: Path) -> None:
    """The embedding of one token is broken: the requests without it do not suffer."""
    copy = shutil.copytree(folder("bert"), tmp_path / "bert")
    data = bytearray((copy / "model.safetensors").read_bytes())
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])["embeddings.word_embeddings.weight"]
    width = 2 * entry["shape"][1]
    start = 8 + size + entry["data_offsets"][0] + 7 * width
    data[start : start + width] = b"\xff" * width
    (copy / "model.safetensors").write_bytes(data)
    with make_llm("bert", 48) as good, make_llm(str(copy), 48) as llm:
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in ([5, 6], [5, 7, 9], [8])]
        with pytest.raises(RuntimeError, match=r"prompts\[1\]: .* no finite numbers .*\(1 of 3 failed\.\)"):
            llm.embed(prompts, use_tqdm=False)
        for mine, theirs in zip(encode(llm, prompts[::2], "embed"), encode(good, prompts[::2], "embed"), strict=True):
            np.testing.assert_array_equal(mine, theirs)

"""PoolingParams: which fields there are, and what a model makes of them; errors are in vLLM's words."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm import PoolingParams, SamplingParams
from jaxllm.engine.front.pooling_resolver import resolve_pooling_params, verify_pooling_task
from jaxllm.exceptions import VLLMValidationError
from jaxllm.pooling_params import LateChunkingParams
from jaxllm.resolve.pooling_settings import PoolingSettings
from jaxllm.sampling_params import RequestOutputKind
from tests.params.embedder import EMBEDDER


def changed(**fields: Any) -> PoolingSettings:
    return msgspec.structs.replace(EMBEDDER, **fields)


MATRYOSHKA = changed(is_matryoshka=True, matryoshka_dimensions=[64, 128])
CLASSIFIER = changed(tasks=("classify", "token_classify"), activation="softmax", output_size=3, num_labels=3)
REWARDS = changed(
    tasks=("token_classify",), is_step=True, step_tag_id=7, returned_token_ids=[2, 0], output_size=5, num_labels=5
)

BAD_VALUES = [
    ("use_activation", 1),
    ("dimensions", 0),
    ("dimensions", 1.5),
    ("dimensions", True),
    ("step_tag_id", -1),
    ("returned_token_ids", [-1]),
    ("returned_token_ids", "ab"),
    ("task", 3),
    ("task", "score"),
    ("task", "encode"),
    ("requires_token_ids", "yes"),
    ("skip_reading_prefix_cache", 0),
    ("late_interaction_params", {"mode": "cache_query"}),
    ("extra_kwargs", {}),
    ("late_chunking_params", {"chunk_size": 2}),
    ("output_kind", RequestOutputKind.DELTA),
    ("dimensions", math.nan),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_bad_values_name_their_field(name: str, value: Any):
    with pytest.raises(VLLMValidationError, match=name) as caught:
        PoolingParams(**{name: value})
    assert caught.value.parameter == name
    params = PoolingParams()
    setattr(params, name, value)
    with pytest.raises(VLLMValidationError, match=name):
        resolve_pooling_params(params, None, EMBEDDER)


def test_fields_are_vllms():
    assert " ".join(PoolingParams.__struct_fields__) == (
        "use_activation dimensions step_tag_id returned_token_ids task requires_token_ids skip_reading_prefix_cache "
        "late_interaction_params extra_kwargs output_kind late_chunking_params"
    )
    params = PoolingParams(dimensions=np.int64(3), returned_token_ids=np.array([2, 1]))  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PoolingParams) == params
    assert (params.dimensions, params.returned_token_ids) == (3, [2, 1])


def test_params_are_completed_in_a_copy():
    original = PoolingParams()
    params = resolve_pooling_params(original, "embed", EMBEDDER)
    assert (params.task, params.use_activation, params.skip_reading_prefix_cache) == ("embed", True, False)
    assert original == PoolingParams()
    assert resolve_pooling_params(None, "embed", EMBEDDER) == params
    assert resolve_pooling_params(PoolingParams(task="embed"), None, EMBEDDER) == params
    assert resolve_pooling_params(params, "embed", EMBEDDER) == params
    plain = changed(use_activation=False, dimensions=64, is_matryoshka=True)
    assert resolve_pooling_params(None, "embed", plain).use_activation is False
    assert resolve_pooling_params(PoolingParams(use_activation=True), "embed", plain).use_activation is True
    assert resolve_pooling_params(None, "embed", plain).dimensions == 64
    assert resolve_pooling_params(PoolingParams(dimensions=32), "token_embed", plain).dimensions == 32


@pytest.mark.parametrize(
    ("settings", "task"),
    [(EMBEDDER, "token_embed"), (CLASSIFIER, "token_classify"), (changed(tasks=("embed",)), "embed")],
)
def test_without_a_task_all_tokens_have_outputs(settings: PoolingSettings, task: str):
    assert resolve_pooling_params(None, None, settings).task == task


def test_tasks():
    with pytest.raises(VLLMValidationError) as caught:
        resolve_pooling_params(PoolingParams(task="embed"), "classify", CLASSIFIER)
    assert str(caught.value) == "You cannot overwrite param.task='embed' with pooling_task='classify'!"
    with pytest.raises(VLLMValidationError) as caught:
        resolve_pooling_params(PoolingParams(task="plugin"), None, EMBEDDER)
    assert str(caught.value) == "Unsupported task: 'plugin' Supported tasks: ['embed', 'token_embed']"
    with pytest.raises(VLLMValidationError, match="pooling_params must be PoolingParams"):
        resolve_pooling_params(SamplingParams(), "embed", EMBEDDER)


@pytest.mark.parametrize(
    ("settings", "dimensions", "message"),
    [
        (
            EMBEDDER,
            64,
            "Model 'minilm' does not support Matryoshka embeddings; dimensions must be unset (received dimensions=64).",
        ),
        (MATRYOSHKA, 385, "Model 'minilm' only supports dimensions in range [1, 384], got 385."),
        (MATRYOSHKA, 65, "Model 'minilm' only supports Matryoshka dimensions [64, 128], got 65."),
    ],
)
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_dimensions_that_embeddings_cannot_have(settings: PoolingSettings, dimensions: int, message: str, task: str):
    with pytest.raises(VLLMValidationError) as caught:
        resolve_pooling_params(PoolingParams(dimensions=dimensions), task, settings)
    assert (str(caught.value), caught.value.parameter) == (message, "dimensions")


def test_dimensions_that_they_can():
    assert resolve_pooling_params(PoolingParams(dimensions=128), "embed", MATRYOSHKA).dimensions == 128
    free = changed(is_matryoshka=True)
    assert resolve_pooling_params(PoolingParams(dimensions=384), "embed", free).dimensions == 384


def test_fields_of_other_tasks():
    with pytest.raises(VLLMValidationError) as caught:
        resolve_pooling_params(PoolingParams(dimensions=2), "classify", CLASSIFIER)
    words = "Task 'classify' only supports ['use_activation'] parameters, does not support ['dimensions'] parameters"
    assert (str(caught.value), caught.value.parameter) == (words, "dimensions")
    with pytest.raises(VLLMValidationError, match=r"does not support \['step_tag_id'\] parameters"):
        resolve_pooling_params(PoolingParams(step_tag_id=3), "token_classify", CLASSIFIER)
    step = changed(is_step=True, tasks=("embed", "token_embed"))
    with pytest.raises(VLLMValidationError, match=r"does not support \['returned_token_ids'\] parameters"):
        resolve_pooling_params(PoolingParams(returned_token_ids=[3]), "embed", step)


def test_step_fields():
    params = resolve_pooling_params(None, "token_classify", REWARDS)
    assert (params.step_tag_id, params.returned_token_ids) == (7, [2, 0])
    resolved = resolve_pooling_params(PoolingParams(step_tag_id=0, returned_token_ids=[4]), "token_classify", REWARDS)
    assert (resolved.step_tag_id, resolved.returned_token_ids) == (0, [4])
    with pytest.raises(VLLMValidationError, match="returned_token_ids has 5, and an output has 5 numbers"):
        resolve_pooling_params(PoolingParams(returned_token_ids=[5]), "token_classify", REWARDS)


def test_the_cache_stands_in_for_no_token_that_is_needed():
    whole = changed(runs_whole_tasks=("embed",))
    for settings, task, skips in ((EMBEDDER, "embed", False), (EMBEDDER, "token_embed", True), (whole, "embed", True)):
        assert resolve_pooling_params(None, task, settings).skip_reading_prefix_cache is skips
        if skips:
            with pytest.raises(VLLMValidationError, match="skip_reading_prefix_cache=False"):
                resolve_pooling_params(PoolingParams(skip_reading_prefix_cache=False), task, settings)
    asked = PoolingParams(skip_reading_prefix_cache=True)
    assert resolve_pooling_params(asked, "embed", EMBEDDER).skip_reading_prefix_cache is True


@pytest.mark.parametrize(
    ("task", "settings", "runner", "words"),
    [
        ("generate", EMBEDDER, "pooling", "LLM.generate() is only supported for generative models. Try passing "),
        (
            "embed",
            None,
            "generate",
            "LLM.encode() is only supported for pooling models. Try passing `--runner pooling`",
        ),
        (None, EMBEDDER, "pooling", "pooling_task required for `LLM.encode`."),
        (
            *("embed", CLASSIFIER, "pooling"),
            "Embedding API is not supported by this model. Try converting the model using `--convert embed`.",
        ),
        (
            *("token_classify", EMBEDDER, "pooling"),
            "Classification API is not supported by this model. Try converting the model using `--convert classify`.",
        ),
        (
            *("token_embed", changed(tasks=("embed",)), "pooling"),
            'Try switching the model\'s pooling_task via `PoolerConfig(task="token_embed")`',
        ),
        ("plugin", EMBEDDER, "pooling", "Unsupported task: 'plugin' Supported tasks: ('embed', 'token_embed')"),
    ],
)
def test_tasks_that_an_engine_does_not_do(task: str | None, settings: PoolingSettings | None, runner: str, words: str):
    with pytest.raises(VLLMValidationError) as caught:
        verify_pooling_task(task, settings, runner)
    assert str(caught.value).startswith(words)


def test_tasks_that_it_does():
    verify_pooling_task("generate", None, "generate")
    verify_pooling_task("embed", EMBEDDER, "pooling")
    verify_pooling_task("generate", EMBEDDER, "generate")
    verify_pooling_task("embed", EMBEDDER, "generate")


def test_chunks_are_of_token_embeddings_and_of_models_that_are_linear_after_them():
    late = LateChunkingParams(chunk_size=3)
    params = resolve_pooling_params(PoolingParams(late_chunking_params=late), "token_embed", EMBEDDER)
    assert (params.late_chunking_params, params.skip_reading_prefix_cache) == (late, True)
    for task, settings in (("embed", EMBEDDER), ("token_embed", changed(has_linear_head=False))):
        with pytest.raises(VLLMValidationError, match="late_chunking_params"):
            resolve_pooling_params(PoolingParams(late_chunking_params=late), task, settings)
    for size in (0, 2**63, 1.5, True):
        with pytest.raises(VLLMValidationError, match="chunk_size"):
            LateChunkingParams(chunk_size=size)  # type: ignore[arg-type]

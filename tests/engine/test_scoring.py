"""Scores of pairs: the prompts that are run for them, and how vectors are compared."""

from __future__ import annotations

import copy
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.scoring import SIMILARITIES, Scorer, cut_text, max_sim
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.resolve.pooling_settings import PoolingSettings
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import byte_level, make_ready
from tests.params.test_pooling_params import changed

EMBED = changed(score_type="bi-encoder")
CROSS = changed(tasks=("classify",), score_type="cross-encoder", runs_whole_tasks=("classify",))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def front(tokenizer: Tokenizer) -> FrontEnd:
    return FrontEnd(make_ready(), tokenizer, None)


def scorer(front: FrontEnd, settings: PoolingSettings) -> Scorer:
    """Return the scorer of a front end with a model of this pooling type."""
    pooled = copy.copy(front)
    pooled.ready = msgspec.structs.replace(front.ready, pooling=settings)
    return Scorer(pooled)


def output(name: str, data: Any, ids: list[int]) -> PoolingRequestOutput[PoolingOutput]:
    array = np.asarray(data, np.float32)
    return PoolingRequestOutput(name, PoolingOutput(array), ids, num_cached_tokens=1, finished=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cosine", 0.96), ("dot", 24.0), ("euclidean", -math.sqrt(2)), ("manhattan", -2.0)],
)
def test_vectors_are_compared_as_sentence_transformers_does(name: str, expected: float):
    one, two = np.asarray([3, 4], np.float32), np.asarray([4, 3], np.float32)
    assert SIMILARITIES[name](one, two) == pytest.approx(expected, rel=1e-12)
    assert SIMILARITIES[name](one, one) > SIMILARITIES[name](one, -one)
    assert math.isfinite(SIMILARITIES[name](one * 0, two))


def test_tokens_find_their_best_match():
    query = np.asarray([[1, 0], [0, 1]], np.float32)
    document = np.asarray([[0.5, 0.25], [0.1, 0.75], [-1, -1]], np.float32)
    assert max_sim(query, document) == 1.25
    assert max_sim(document[:1], query) == 0.5


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_folder_says_how_its_embeddings_are_compared(front: FrontEnd, similarity: str):
    settings = changed(similarity=similarity)
    plan = scorer(front, settings).plan("a", ["b", "a"])
    assert (plan.task, plan.sources) == ("embed", ["data_2", "data_1"])
    assert plan.prompts == [{"prompt": "b"}, {"prompt": "a"}]
    vectors = {"b": [1.0, 2.0], "a": [3.0, 1.0]}
    outputs = [output(each["prompt"], vectors[each["prompt"]], [5, 6]) for each in plan.prompts]
    first, second = plan.scores(outputs)
    a, b = np.asarray(vectors["a"]), np.asarray(vectors["b"])
    assert first.outputs.score == SIMILARITIES[similarity](a, b)
    assert second.outputs.score == SIMILARITIES[similarity](a, a)
    assert (first.request_id, first.num_cached_tokens, first.finished) == ("a_b", 2, True)
    assert [each for each in first.prompt_token_ids if each in (5, 6)] == [5, 6, 5, 6]


def test_a_cross_encoder_reads_pairs(front: FrontEnd):
    plan = scorer(front, CROSS).plan(["a", "b"], ["c", "d"])
    assert (plan.task, plan.sources) == ("classify", ["data_2", "data_2"])
    assert plan.prompts == [{"prompt": "a", "text_pair": "c"}, {"prompt": "b", "text_pair": "d"}]
    scores = plan.scores([output("0", [0.25], [1]), output("1", [0.5], [2, 3])])
    assert [each.outputs.score for each in scores] == [0.25, 0.5]
    assert [each.prompt_token_ids for each in scores] == [[1], [2, 3]]


def test_a_template_makes_the_prompt(front: FrontEnd):
    template = "{% for each in messages %}[{{ each.role }}: {{ each.content }}]{% endfor %}{{ instruction }}"
    arguments: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"instruction": "!"}}
    [prompt] = scorer(front, CROSS).plan("a", "b", **arguments).prompts
    assert prompt.text == "[query: a][document: b]!"
    refused: list[tuple[PoolingSettings, dict[str, Any]]] = [
        (EMBED, {"chat_template": template}),
        (CROSS, {"chat_template_kwargs": {"a": 1}}),
    ]
    for settings, more in refused:
        with pytest.raises(VLLMValidationError) as caught:
            scorer(front, settings).plan("a", "b", **more)
        assert caught.value.parameter in more


@pytest.mark.parametrize("text", ["abc def", "é😀 x", "abc"])
def test_a_text_is_cut_to_its_first_tokens(tokenizer: Tokenizer, text: str):
    for most in range(1, 12):
        cut = cut_text(tokenizer, text, most)
        assert text.startswith(cut)
        [ids] = tokenizer.encode([cut], add_special_tokens=False)
        assert len(ids) <= most
        [longer] = tokenizer.encode([text[: len(cut) + 1]], add_special_tokens=False)
        assert cut == text or len(longer) > most


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (["a", "b"], ["c"], "Input lengths must be either 1:1, 1:N or N:N"),
        (["a", "b"], [], "Input lengths must be either 1:1, 1:N or N:N"),
        ([], ["a"], "At least one text element must be given"),
        ("a", [], "At least one text_pair element must be given"),
        ("a", [5], "data_2 must be a text or a list of texts, got 5"),
    ],
)
def test_texts_that_make_no_pairs_are_refused(front: FrontEnd, one: Any, two: Any, words: str):
    with pytest.raises(VLLMValidationError, match=words):
        scorer(front, EMBED).plan(one, two)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (("classify",), "Scoring API is only enabled for num_labels == 1"),
        (("token_classify",), "This model does not support the Scoring API"),
    ],
)
def test_a_model_that_scores_no_pairs_says_so(front: FrontEnd, tasks: tuple[str, ...], words: str):
    with pytest.raises(VLLMValidationError, match="only supported for pooling models"):
        Scorer(front)
    with pytest.raises(VLLMValidationError, match=words):
        scorer(front, changed(tasks=tasks, score_type=None))

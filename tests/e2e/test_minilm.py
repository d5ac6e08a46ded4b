"""all-MiniLM-L6-v2, real weights and tokenizer, equals sentence-transformers; scripts/make.py embedding_goldens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm import LLM
from tests.e2e.goldens import FOLDER

pytestmark = pytest.mark.device

COSINE = 1e-5
"""The cosine with sentence-transformers' vector is at least 1 less this."""


class Goldens(NamedTuple):
    """Texts and their embeddings [n, d]: those of random words, a corpus, and questions about it."""

    texts: list[str]
    lengths: np.ndarray
    embeddings: np.ndarray
    num_texts: int
    num_questions: int


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    with np.load(FOLDER / "all-minilm-l6-v2.npz") as arrays:
        sizes = (int(arrays[name]) for name in ("num_texts", "num_questions"))
        return Goldens(json.loads(arrays["texts"].tobytes().decode()), arrays["lengths"], arrays["embeddings"], *sizes)


@pytest.fixture(scope="module")
def llm(minilm_path: str) -> Iterator[LLM]:
    """Start one engine, with one program, for as many tokens as the model has positions."""
    with LLM(minilm_path, dtype="float32", max_model_len=512, cudagraph_capture_sizes=[512], enforce_eager=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def embeddings(llm: LLM, goldens: Goldens) -> np.ndarray:
    outputs = llm.embed(goldens.texts, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == goldens.lengths.tolist()
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def test_embeddings_equal_sentence_transformers(embeddings: np.ndarray, goldens: Goldens) -> None:
    assert goldens.num_texts == 200
    assert goldens.lengths.min() == 3
    assert goldens.lengths.max() == 512
    lengths = np.linalg.norm(embeddings, axis=1) * np.linalg.norm(goldens.embeddings, axis=1)
    cosines = np.sum(embeddings * goldens.embeddings, axis=1) / lengths
    assert cosines.min() >= 1 - COSINE
    np.testing.assert_allclose(embeddings, goldens.embeddings, rtol=0, atol=1e-5)


def test_a_corpus_is_found_in_the_same_order(embeddings: np.ndarray, goldens: Goldens) -> None:
    first, last = goldens.num_texts, len(goldens.texts) - goldens.num_questions

    def orders(vectors: np.ndarray) -> np.ndarray:
        return np.argsort(-(vectors[last:] @ vectors[first:last].T), axis=1)

    np.testing.assert_array_equal(orders(embeddings), orders(goldens.embeddings))
    nearest = [goldens.texts[first + order[0]] for order in orders(embeddings)]
    assert nearest[0].startswith("Bees")
    assert len(set(nearest)) == len(nearest)


def test_scores_are_cosines(llm: LLM, goldens: Goldens) -> None:
    first, last = goldens.num_texts, len(goldens.texts) - goldens.num_questions
    scores = [each.outputs.score for each in llm.score(goldens.texts[last], goldens.texts[first:last], use_tqdm=False)]
    expected = goldens.embeddings[first:last] @ goldens.embeddings[last]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def test_the_context_is_the_folders_by_default(minilm_path: str) -> None:
    with LLM(minilm_path, enforce_eager=True) as llm:
        assert llm.model_config.max_model_len == 256
        long = "word " * 300
        with pytest.raises(ValueError, match="maximum context length is 256 tokens"):
            llm.embed([long])
        [cut] = llm.embed([long], tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 256
        assert cut.prompt_token_ids[-1] == 102  # [SEP] stays
        for side, word in (("left", "bees"), ("right", "words")):
            options = {"truncate_prompt_tokens": 3, "truncation_side": side}
            [cut] = llm.embed("words of bees", tokenization_kwargs=options, use_tqdm=False)
            assert llm.get_tokenizer().decode(cut.prompt_token_ids) == f"[CLS] {word} [SEP]"


def test_a_prompt_of_the_folder_comes_before_texts(minilm_path: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(minilm_path, tmp_path / "model", copy_function=os.symlink))
    settings = copy / "config_sentence_transformers.json"
    saved = json.loads(settings.read_text()) | {"prompts": {"query": "q: ", "passage": "p: "}}
    settings.unlink()
    settings.write_text(json.dumps(saved | {"default_prompt_name": "query"}))
    with LLM(str(copy), enforce_eager=True, cudagraph_capture_sizes=[256]) as llm:

        def embed(text: str, **options: Any) -> list[float]:
            return llm.embed(text, use_tqdm=False, **options)[0].outputs.embedding

        plain = embed("q: where", prompt_name="passage")
        assert embed("where") == embed("where", prompt_name="query") != embed("where", prompt_name="passage")
        assert plain != embed("where")
        with pytest.raises(
            ValueError, match="prompt_name='other': the checkpoint has no such prompt; it has query, pass"
        ):
            embed("where", prompt_name="other")
        ids = llm.get_tokenizer()("q: where")["input_ids"]
        [of_ids] = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        assert of_ids.outputs.embedding == embed("where")

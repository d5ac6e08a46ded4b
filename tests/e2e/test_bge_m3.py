"""BGE-M3's three outputs through `LLM` and a server, of a folder in the published layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, PoolingParams
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.pooling_params import LateChunkingParams
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.e2e.test_late_interaction import SETTINGS, TOLERANCE
from tests.server.support import Served, served

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

FOLDER = Path(__file__).parents[1] / "data" / "bge_m3"
OPTIONS: dict[str, Any] = SETTINGS | {
    "max_model_len": 120,
    "max_num_batched_tokens": 256,
    "cudagraph_capture_sizes": [256],
}
KINDS = {"embed": "dense", "token_embed": "colbert", "token_classify": "sparse"}
"""The name of each task's goldens."""
with np.load(FOLDER / "golden.npz") as arrays:
    GOLDEN: dict[str, np.ndarray] = dict(arrays)
TEXTS: list[str] = json.loads(GOLDEN["texts"].tobytes())


def lexical_weights(output: Any) -> dict[int, float]:
    """Return what the documentation's example does."""
    words: dict[int, float] = {}
    for word, weight in zip(output.prompt_token_ids[1:-1], output.outputs.data.tolist(), strict=True):
        words[word] = max(weight, words.get(word, 0.0))
    return words


def assert_near(values: Any, wanted: np.ndarray) -> None:
    assert np.shape(values) == wanted.shape
    np.testing.assert_allclose(values, wanted, rtol=0, atol=TOLERANCE)


def test_three_outputs_and_lexical_scores() -> None:
    with LLM(str(FOLDER), **OPTIONS, use_tqdm_on_load=False) as llm:
        for task, kind in KINDS.items():
            outputs = llm.encode(TEXTS, pooling_task=task, use_tqdm=False)
            for index, output in enumerate(outputs):
                assert output.prompt_token_ids == GOLDEN[f"ids_{index}"].tolist()
                assert_near(output.outputs.data, GOLDEN[f"{kind}_{index}"])
        words = [lexical_weights(output) for output in llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)]
        scores = [[sum(one[word] * two.get(word, 0.0) for word in one) for two in words] for one in words]
        np.testing.assert_allclose(scores, GOLDEN["lexical_scores"], rtol=0, atol=TOLERANCE)
        assert GOLDEN["lexical_scores"].max() > 1
        [score] = llm.score(TEXTS[1], TEXTS[2], use_tqdm=False)
        assert score.outputs.score == pytest.approx(float(GOLDEN["dense_1"] @ GOLDEN["dense_2"]), abs=TOLERANCE)

        # Token ids that have no marks lose none; what is left out of outputs is the activation.
        ids = GOLDEN["ids_1"].tolist()
        [whole, inner] = llm.encode(
            [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[1:-1]}], pooling_task="token_embed", use_tqdm=False
        )
        assert (len(whole.outputs.data), len(inner.outputs.data)) == (len(ids) - 1, len(ids) - 2)
        raw = PoolingParams(use_activation=False)
        [output] = llm.encode(TEXTS[1], raw, pooling_task="token_classify", use_tqdm=False)
        assert output.outputs.data.min() < 0
        assert_near(np.maximum(output.outputs.data, 0), GOLDEN["sparse_1"])
        with pytest.raises(VLLMValidationError, match="late_chunking_params is not supported here"):
            llm.encode(TEXTS[1], PoolingParams(late_chunking_params=LateChunkingParams(4)), pooling_task="token_embed")
        with pytest.raises(VLLMValidationError, match="Classification API is not supported by this model"):
            llm.classify(TEXTS[1])


def test_scores_of_tokens_are_sums() -> None:
    with LLM(str(FOLDER), **OPTIONS, pooler_config={"task": "token_embed"}, use_tqdm_on_load=False) as llm:
        [score] = llm.score(TEXTS[1], TEXTS[2], use_tqdm=False)
    sims = GOLDEN["colbert_1"] @ GOLDEN["colbert_2"].T
    assert score.outputs.score == pytest.approx(float(sims.max(axis=1).sum()), rel=TOLERANCE)


def test_weights_alone() -> None:
    with LLM(str(FOLDER), **OPTIONS, pooler_config={"task": "token_classify"}, use_tqdm_on_load=False) as llm:
        [output] = llm.encode(TEXTS[2], pooling_task="token_classify", use_tqdm=False)
        assert_near(output.outputs.data, GOLDEN["sparse_2"])


@pytest.mark.parametrize(
    ("copied", "architecture", "sizes"),
    [
        (False, None, (32, 17)),
        (True, "XLMRobertaModel", (32, 17)),
        (True, "BgeM3EmbeddingModel", (32, 16)),
    ],
    ids=["files missing", "plain by name", "vLLM's name"],
)
def test_which_model_it_is(tmp_path: Path, copied: bool, architecture: str | None, sizes: tuple[int, int]) -> None:
    """The heads' files make it a BGE-M3, unless another architecture is asked for."""
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    if not copied:
        (folder / "sparse_linear.pt").unlink()
    overrides: dict[str, Any] = {} if architecture is None else {"hf_overrides": {"architectures": [architecture]}}
    with LLM(str(folder), **OPTIONS, **overrides, use_tqdm_on_load=False) as llm:
        [output] = llm.encode(TEXTS[1], pooling_task="token_embed", use_tqdm=False)
    assert output.outputs.data.shape == sizes[::-1]


def test_what_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    (folder / "colbert_linear.pt").unlink()
    for options, words in (
        ({"hf_overrides": {"architectures": ["BgeM3EmbeddingModel"]}}, "colbert_linear"),
        ({"model": str(FOLDER), "pooler_config": {"pooling_type": "STEP"}}, "heads of their own"),
    ):
        with pytest.raises(VLLMValidationError, match=words):
            LLM(**{"model": str(folder), **OPTIONS, **options}, use_tqdm_on_load=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = AsyncEngineArgs(str(FOLDER), **OPTIONS)
    with (
        AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm,
        served(llm) as server,
    ):
        yield server


def test_routes(server: Served) -> None:
    for task, kind in KINDS.items():
        answer = server.post("/pooling", {"input": TEXTS, "task": task})
        assert answer.status == 200, answer.body
        for index, row in enumerate(answer.json["data"]):
            assert_near(row["data"], GOLDEN[f"{kind}_{index}"])
    answer = server.post("/v1/embeddings", {"input": TEXTS})
    for index, row in enumerate(answer.json["data"]):
        assert_near(row["embedding"], GOLDEN[f"dense_{index}"])
    results = server.post("/rerank", {"query": TEXTS[1], "documents": TEXTS}).json["results"]
    assert results[0]["index"] == 1
    assert server.post("/classify", {"input": TEXTS[1]}).status == 400

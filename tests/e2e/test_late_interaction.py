"""ColBERT models through `LLM` and a server: tokens, vectors and scores are PyLate's and sentence-transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.loading.sentence_files import write_json_files
from tests.server.support import Served, served

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

FOLDER = Path(__file__).parents[1] / "data" / "late_interaction"
CASES = tuple(sorted(path.name for path in FOLDER.iterdir()))
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "cudagraph_capture_sizes": [64],
    "enforce_eager": True,
}
SIDES = ("query", "document")
PYLATE, ENCODER = "config_sentence_transformers.json", "sentence_bert_config.json"
TOLERANCE = 1e-5


class Golden:
    """A tool's results."""

    def __init__(self, case: str) -> None:
        with np.load(FOLDER / case / "golden.npz") as arrays:
            self._arrays = dict(arrays)
        self.texts: list[str] = json.loads(self._arrays["texts"].tobytes())
        self.scores = self._arrays["scores"]

    def ids(self, side: str, index: int) -> list[int]:
        return self._arrays[f"{side}_ids_{index}"].tolist()

    def vectors(self, side: str, index: int) -> np.ndarray:
        return self._arrays[f"{side}_{index}"]


@pytest.mark.parametrize("case", CASES)
def test_tokens_vectors_and_scores_are_the_tools(case: str) -> None:
    """All texts of a side are run at once, so that short queries are filled up beside long ones."""
    golden = Golden(case)
    with LLM(str(FOLDER / case), **SETTINGS, use_tqdm_on_load=False) as llm:
        for side in SIDES:
            outputs = llm.encode(golden.texts, pooling_task="token_embed", prompt_name=side, use_tqdm=False)
            for index, output in enumerate(outputs):
                assert output.prompt_token_ids == golden.ids(side, index)
                np.testing.assert_allclose(output.outputs.data, golden.vectors(side, index), rtol=0, atol=TOLERANCE)
        for text, expected in zip(golden.texts, golden.scores, strict=True):
            scores = [each.outputs.score for each in llm.score(text, golden.texts, use_tqdm=False)]
            np.testing.assert_allclose(scores, expected, rtol=TOLERANCE)
        [plain] = llm.encode(golden.texts[:1], pooling_task="token_embed", use_tqdm=False)
        assert plain.prompt_token_ids == llm.get_tokenizer().encode(golden.texts[0])
        assert len(plain.outputs.data) == len(plain.prompt_token_ids)


def test_no_token_attends_to_fillers() -> None:
    """They change no other vector; with fillers alone, or within a text, tokens attend to all."""
    golden, case = Golden("stanford"), str(FOLDER / "stanford")
    with LLM(case, **SETTINGS, use_tqdm_on_load=False) as llm:
        filler_id = llm.get_tokenizer().mask_token_id
        ids = golden.ids("document", 1)
        prompts = [ids, [*ids, *[filler_id] * 7], [filler_id] * 5, [ids[0], filler_id, *ids[1:]]]
        outputs = llm.encode([{"prompt_token_ids": each} for each in prompts], pooling_task="token_embed")
        plain, filled, alone, within = (output.outputs.data for output in outputs)
        np.testing.assert_allclose(filled[: len(ids)], plain, rtol=0, atol=1e-6)
        assert np.isfinite(alone).all()
        assert np.abs(within[0] - plain[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        ("pylate_modernbert", "ColBERTModernBertModel"),
        ("pylate_lfm2", "ColBERTLfm2Model"),
        ("jina", "ColBERTJinaRobertaModel"),
    ],
)
def test_vllms_names_of_architectures(case: str, architecture: str) -> None:
    golden = Golden(case)
    overrides = {"architectures": [architecture]}
    with LLM(str(FOLDER / case), **SETTINGS, hf_overrides=overrides, use_tqdm_on_load=False) as llm:
        scores = [each.outputs.score for each in llm.score(golden.texts[1], golden.texts, use_tqdm=False)]
        np.testing.assert_allclose(scores, golden.scores[1], rtol=TOLERANCE)


def test_rotary_positions_beside_metadata_are_jinas(tmp_path: Path) -> None:
    """The marks are Jina's by default, and the file may name others; config.json may name the encoder alone."""
    golden, folder = Golden("jina"), shutil.copytree(FOLDER / "jina", tmp_path / "model")
    hf = json.loads((folder / "config.json").read_text()) | {"architectures": ["XLMRobertaModel"]}
    settings = json.loads((folder / "artifact.metadata").read_text())
    marks = {"query_token_id": "[DocumentMarker]", "doc_token_id": "[QueryMarker]"}
    write_json_files(folder, {"config.json": hf, "artifact.metadata": settings | marks})
    with LLM(str(folder), **SETTINGS, use_tqdm_on_load=False) as llm:
        [output] = llm.encode(golden.texts[0], pooling_task="token_embed", prompt_name="query", use_tqdm=False)
    ids = golden.ids("query", 0)
    assert output.outputs.data.shape == golden.vectors("query", 0).shape
    assert output.prompt_token_ids == [ids[0], golden.ids("document", 0)[1], *ids[2:]]


def test_a_decoder_fills_up_queries(tmp_path: Path) -> None:
    """No token attends to fillers that follow it, so the others are as in PyLate without fillers."""
    golden = Golden("pylate_lfm2")
    shutil.copytree(FOLDER / "pylate_lfm2", tmp_path / "model")
    settings = json.loads((tmp_path / "model/config_sentence_transformers.json").read_text())
    write_json_files(tmp_path / "model", {"config_sentence_transformers.json": settings | {"do_query_expansion": True}})
    with LLM(str(tmp_path / "model"), **SETTINGS, use_tqdm_on_load=False) as llm:
        [output] = llm.encode(golden.texts[0], pooling_task="token_embed", prompt_name="query", use_tqdm=False)
    ids = golden.ids("query", 0)
    assert output.prompt_token_ids == ids + [1] * (14 - len(ids))
    np.testing.assert_allclose(output.outputs.data[: len(ids)], golden.vectors("query", 0), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("side", "lead"), [("query", "how: "), ("document", "how: ")])
def test_the_default_prompt_is_for_both_sides(tmp_path: Path, side: str, lead: str) -> None:
    """As in PyLate, where prompts are not named after the sides."""
    golden, folder = Golden("pylate_roberta"), shutil.copytree(FOLDER / "pylate_roberta", tmp_path / "model")
    settings = json.loads((folder / PYLATE).read_text()) | {"prompts": {"lead": lead}, "default_prompt_name": "lead"}
    write_json_files(folder, {PYLATE: settings})
    with LLM(str(folder), **SETTINGS, use_tqdm_on_load=False) as llm:
        [output] = llm.encode(golden.texts[0], pooling_task="token_embed", prompt_name=side, use_tqdm=False)
        expected = llm.get_tokenizer().encode(lead + golden.texts[0])
    if side == "query":
        expected = golden.ids("query", 0)
    assert output.prompt_token_ids == expected


@pytest.fixture(scope="module", params=["stanford", "pylate_long_queries"])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(case: str) -> Iterator[Served]:
    args = AsyncEngineArgs(str(FOLDER / case), **SETTINGS)
    with (
        AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm,
        served(llm) as server,
    ):
        yield server


def test_routes_score_as_the_tool(server: Served, case: str) -> None:
    golden = Golden(case)
    answer = server.post("/score", {"text_1": golden.texts[1], "text_2": golden.texts})
    assert answer.status == 200, answer.body
    scores = [each["score"] for each in answer.json["data"]]
    np.testing.assert_allclose(scores, golden.scores[1], rtol=TOLERANCE)
    assert answer.json["usage"]["prompt_tokens"] == sum(
        len(golden.ids(*each)) for each in [("query", 1), *(("document", i) for i in range(len(golden.texts)))]
    )
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = server.post(path, {"query": golden.texts[1], "documents": golden.texts}).json["results"]
        order = np.argsort(-golden.scores[1], kind="stable")
        assert [each["index"] for each in results] == order.tolist()
        relevance = [each["relevance_score"] for each in results]
        np.testing.assert_allclose(relevance, golden.scores[1][order], rtol=TOLERANCE)


@pytest.mark.parametrize("side", SIDES)
def test_pooling_route_reads_queries_and_documents(server: Served, case: str, side: str) -> None:
    golden = Golden(case)
    body = {"input": golden.texts, "task": "token_embed", "prompt_name": side}
    answer = server.post("/pooling", body)
    assert answer.status == 200, answer.body
    for index, row in enumerate(answer.json["data"]):
        np.testing.assert_allclose(row["data"], golden.vectors(side, index), rtol=0, atol=TOLERANCE)
    plain = server.post("/pooling", {"input": golden.texts[0], "task": "token_embed"}).json["data"][0]["data"]
    assert len(plain) == len(golden.ids("document", 0)) - 1  # without the mark


def test_names_that_no_text_can_have(server: Served) -> None:
    for body, parameter, words in (
        ({"input": "a", "prompt_name": "passage"}, "prompt_name", "only query, document"),
        ({"input": [3, 4], "prompt_name": "query"}, "input", "makes a query or a document of a text"),
        ({"input": "a", "task": "embed"}, "task", "Unsupported task"),
    ):
        answer = server.post("/pooling", body)
        assert (answer.status, answer.json["error"]["param"]) == (400, parameter)
        assert words in answer.json["error"]["message"]


def refusal(tmp_path: Path, case: str, files: dict[str, Any]) -> str:
    """Return the error of a case with these changes to its files."""
    shutil.copytree(FOLDER / case, tmp_path / case)
    changed = {name: json.loads((tmp_path / case / name).read_text()) | values for name, values in files.items()}
    write_json_files(tmp_path / case, changed)
    with pytest.raises(VLLMValidationError) as caught:
        LLM(str(tmp_path / case), **SETTINGS, use_tqdm_on_load=False)
    assert caught.value.parameter == "model"
    return str(caught.value)


EXPANSION = {"strategy": "min", "attend": True, "token": None, "length": 12}


@pytest.mark.parametrize(
    ("case", "name", "values", "words"),
    [
        ("pylate_modernbert", PYLATE, {"query_length": "32"}, "query_length is '32'"),
        ("pylate_modernbert", PYLATE, {"query_prefix": "[Query] "}, "'[Query] ', which marks or fills up its texts"),
        ("pylate_modernbert", PYLATE, {"skiplist_words": "!?"}, "skiplist_words is '!?'"),
        ("pylate_modernbert", PYLATE, {"similarity_fn_name": "cosine"}, "similarity_fn_name is 'cosine'"),
        ("pylate_modernbert", "1_Dense/config.json", {"in_features": 31}, "in_features is 31, expected 32"),
        ("stanford", "artifact.metadata", {"doc_maxlen": 0}, "artifact.metadata: doc_maxlen is 0"),
        ("stanford", "artifact.metadata", {"doc_token_id": "[unused9]"}, "'[unused9]', which marks"),
        ("stanford", "artifact.metadata", {"attend_to_mask_tokens": "no"}, "attend_to_mask_tokens is 'no'"),
        ("multi_vector", "2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids"),
        ("multi_vector", ENCODER, {"query_expansion": EXPANSION | {"strategy": "max"}}, "strategy is 'max'"),
        ("multi_vector", ENCODER, {"query_expansion": EXPANSION | {"token": "[FILL]"}}, "'[FILL]'"),
    ],
)
def test_what_files_cannot_say(tmp_path: Path, case: str, name: str, values: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, case, {name: values})

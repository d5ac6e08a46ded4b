"""Jina Embeddings v3 with the adapters of tasks in its checkpoint, chosen for each request."""

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
from jaxllm.lora.request import LoRARequest
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.e2e.test_bge_m3 import OPTIONS as SHORTER
from tests.loading.sentence_files import write_json_files
from tests.server.support import Served, served

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

FOLDER = Path(__file__).parents[1] / "data" / "jina_v3_tasks"
TASKS = ("retrieval.query", "text-matching")
with np.load(FOLDER / "golden.npz") as arrays:
    GOLDEN: dict[str, np.ndarray] = dict(arrays)
TEXTS: list[str] = json.loads(GOLDEN["texts"].tobytes())
TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = SHORTER | {"max_model_len": 128}


def assert_near(values: Any, task: str) -> None:
    np.testing.assert_allclose(values, GOLDEN[task], rtol=0, atol=TOLERANCE)


def test_tasks_add_their_adapters() -> None:
    with LLM(str(FOLDER), **OPTIONS, use_tqdm_on_load=False) as llm:
        for task in (*TASKS, None, *TASKS):
            outputs = llm.embed(TEXTS, prompt_name=task, use_tqdm=False)
            assert_near([output.outputs.embedding for output in outputs], task or "none")
        assert min(np.abs(GOLDEN["none"] - GOLDEN[task]).max() for task in TASKS) > 0.1
        with pytest.raises(VLLMValidationError, match="it has retrieval"):
            llm.embed(TEXTS[0], prompt_name="separation")
        with pytest.raises(VLLMValidationError, match="has an adapter of its own"):
            llm.embed(TEXTS[0], prompt_name=TASKS[0], lora_request=LoRARequest("a", 1, "a"))
        with pytest.raises(VLLMValidationError, match="enable_lora"):
            llm.embed(TEXTS[0], lora_request=LoRARequest("a", 1, "checkpoint://separation"))


def test_one_batch_mixes_tasks() -> None:
    """Requests for different tasks, and for none, are in the same steps."""
    with LLM(str(FOLDER), **OPTIONS, use_tqdm_on_load=False) as llm:
        pooling = llm.llm_engine.front.ready.pooling
        assert pooling is not None
        kinds = [TASKS[0], "none", TASKS[1], "none", TASKS[0]]
        prompts = [pooling.prompts.get(kind, "") + text for kind, text in zip(kinds, TEXTS, strict=True)]
        adapters = [pooling.adapter(kind, None, "") for kind in kinds]
        outputs = llm.embed(prompts, lora_request=adapters, use_tqdm=False)
    for index, kind in enumerate(kinds):
        np.testing.assert_allclose(outputs[index].outputs.embedding, GOLDEN[kind][index], rtol=0, atol=TOLERANCE)


def test_without_its_adapters() -> None:
    """A config without them leaves the prompts out too."""
    overrides: dict[str, Any] = {"load_trained_adapters": False}
    with LLM(str(FOLDER), **OPTIONS, hf_overrides=overrides, use_tqdm_on_load=False) as llm:
        assert_near([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)], "none")
        with pytest.raises(VLLMValidationError, match="it has none"):
            llm.embed(TEXTS[0], prompt_name=TASKS[0])


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = AsyncEngineArgs(str(FOLDER), **OPTIONS)
    with (
        AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm,
        served(llm) as server,
    ):
        yield server


def test_route(server: Served) -> None:
    for task in (*TASKS, None):
        answer = server.post("/v1/embeddings", {"input": TEXTS, "task": task})
        assert answer.status == 200, answer.body
        assert_near([row["embedding"] for row in answer.json["data"]], task or "none")
    for more in ({"task": "separation"}, {"task": TASKS[1], "late_chunking_params": {"chunk_size": 4}}):
        answer = server.post("/v1/embeddings", {"input": TEXTS[0], **more})
        assert (answer.status, answer.json["error"]["param"]) == (400, "task")


def test_a_task_and_an_adapter_are_refused_together(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    models = server.app.state.openai_serving_models
    monkeypatch.setitem(models._adapters, "mine", LoRARequest("mine", 1, "/nowhere"))
    monkeypatch.setitem(models._cards, "mine", models._cards[models.name])
    answer = server.post("/v1/embeddings", {"input": TEXTS[0], "task": TASKS[0], "model": "mine"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")
    assert "'mine'" in answer.json["error"]["message"]


def test_the_default_prompt_has_its_adapter_in_all_routes(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    prompts = json.loads((folder / "config.json").read_text())["task_instructions"]
    settings = {"prompts": prompts, "default_prompt_name": TASKS[0]}
    write_json_files(folder, {"config_sentence_transformers.json": settings})
    args = AsyncEngineArgs(str(folder), **OPTIONS)
    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm, served(llm) as server:
        model = server.get("/v1/models").json["data"][0]["id"]
        rows = server.post("/v1/embeddings", {"input": TEXTS}).json["data"]
        assert_near([row["embedding"] for row in rows], TASKS[0])
        rows = server.post("/pooling", {"input": TEXTS, "task": "embed"}).json["data"]
        assert_near([row["data"] for row in rows], TASKS[0])
        body = {"model": model, "texts": TEXTS, "embedding_types": ["float"]}
        assert_near(server.post("/v2/embed", body).json["embeddings"]["float"], TASKS[0])
        rows = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json["data"]
        vectors = GOLDEN[TASKS[0]]
        np.testing.assert_allclose([row["score"] for row in rows], vectors @ vectors[0], rtol=0, atol=TOLERANCE)

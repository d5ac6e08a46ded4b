"""The weights of a server change over HTTP, from folders alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import nothing_left, tiny_args
from tests.e2e.test_weight_update import CASE, changed, saved
from tests.models.tiny import folder
from tests.server.support import Served, served

pytestmark = pytest.mark.server

BODY = {"prompt": [[5, 6, 7, 8] * 4, [9, 10, 11] * 5], "max_tokens": 12, "temperature": 0, "logprobs": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tmp_path_factory.getbasetemp()  # not below the folder that nothing_left removes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_SERVER_DEV_MODE", "1")
        with nothing_left(), AsyncLLM.from_engine_args(tiny_args()) as llm, served(llm) as server:
            yield server


def choices(server: Served) -> list[object]:
    answer = server.post("/v1/completions", BODY)
    assert answer.status == 200, answer.body
    return answer.json["choices"]


def info(path: Path) -> dict[str, object]:
    return {"update_info": {"weights_path": str(path)}}


def test_vllms_steps(server: Served, tmp_path: Path) -> None:
    path = saved(CASE, changed(CASE), tmp_path / "new")
    with AsyncLLM.from_engine_args(replace(tiny_args(), model=str(path))) as llm, served(llm) as other:
        expected = choices(other)
    before = choices(server)
    assert before != expected
    assert server.get("/weight_info").json == {"weight_version": "default"}
    assert server.post("/init_weight_transfer_engine", {"init_info": {}}).status == 200
    assert server.post("/pause?mode=keep", None).json == {"status": "paused"}
    assert server.post("/start_weight_update", None).json == {"message": "Weight update started"}
    assert server.post("/update_weights", info(path)).json == {"message": "Weights updated"}
    assert server.get("/weight_info").json == {"weight_version": "default"}
    answer = server.post("/finish_weight_update", {"weight_version": "step-1"})
    assert answer.json == {"message": "Weight update finished"}
    assert server.post("/resume", None).json == {"status": "resumed"}
    assert server.get("/weight_info").json == {"weight_version": "step-1"}
    assert choices(server) == expected
    assert server.post("/update_weights", info(folder(CASE))).status == 200  # in one step
    assert choices(server) == before
    answer = server.post("/update_weight_version", {"new_version": 3})
    assert answer.json == {"success": True, "new_version": 3}
    assert server.get("/weight_info").json == {"weight_version": 3}


def test_what_is_refused(server: Served, tmp_path: Path) -> None:
    before = choices(server)
    for path, body, words in (
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}, "init_info must be empty"),
        ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]]}}, "NCCL and IPC"),
        ("/update_weights", {"update_info": {"weights": {"a": [1.0]}}}, "arrays do not reach"),
        ("/update_weights", info(tmp_path), "is not a model in the Hugging Face form"),
        ("/update_weights", info(tmp_path / "no"), "neither a folder"),
        ("/update_weights", info(folder("gemma2")), "belong together"),
        ("/update_weights", {}, "update_info"),
        ("/finish_weight_update", {}, "no update has begun"),
        ("/start_draft_weight_update", None, "no draft model"),
        ("/update_weight_version", {"new_version": ""}, "the version of weights must be"),
    ):
        answer = server.post(path, body)
        assert (answer.status, words in str(answer.json)) == (400, True), (path, body, answer.body)
    assert choices(server) == before

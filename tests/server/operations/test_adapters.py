"""A server's adapters are models by their own names: from the start, and loaded and unloaded while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.app import build_app
from jaxllm.server.openai.serving_models import LoRAModule
from tests.e2e.adapter_data import ADAPTERS, SETTINGS, golden_of, prompt_of
from tests.models.tiny import folder
from tests.server.grpc_support import client_of, grpc_opened, message_of, refusal
from tests.server.openai.test_chat import PATH, joined
from tests.server.support import TEMPLATE, Served, command_line, served

pytestmark = pytest.mark.server

CASE = "llama3_tied"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    settings: dict[str, Any] = SETTINGS | {"skip_tokenizer_init": False, "max_logprobs": 5}
    args = AsyncEngineArgs(str(folder(CASE)), tokenizer=tokenizer, chat_template=TEMPLATE, max_loras=2, **settings)
    as_json = json.dumps({"name": "mlp", "path": str(ADAPTERS / CASE / "mlp"), "base_model_name": "tiny"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        with (
            AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm,
            served(llm, "--lora-modules", f"all={ADAPTERS / CASE / 'all'}", as_json) as running,
        ):
            yield running


def tokens(server: Served, model: str, **fields: Any) -> list[int]:
    """Return the tokens that continue the goldens' prompt."""
    body = {"prompt": prompt_of(CASE), "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    answer = server.post("/v1/completions", body | {"model": model, "return_token_ids": True} | fields)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return answer.json["choices"][0]["token_ids"]


def test_adapters_are_models_by_their_names(server: Served):
    for name in ("all", "mlp"):
        assert tokens(server, name) == golden_of(name, CASE).tokens
    assert tokens(server, "tiny") not in (golden_of("all", CASE).tokens, golden_of("mlp", CASE).tokens)
    cards = {card["id"]: card for card in server.get("/v1/models").json["data"]}
    assert cards.keys() == {"tiny", "all", "mlp"}
    assert cards["tiny"]["parent"] is None
    assert (cards["all"]["parent"], cards["all"]["root"]) == ("tiny", str(ADAPTERS / CASE / "all"))
    assert server.get("/v1/models/mlp").json["parent"] == "tiny"


def test_chats_and_streams(server: Served):
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 8}
    texts = {}
    for name in ("tiny", "all"):
        whole = server.post(PATH, body | {"model": name}).json
        events = server.post(PATH, body | {"model": name, "stream": True}).events
        assert {each["model"] for each in (whole, *events)} == {name}
        texts[name] = whole["choices"][0]["message"]["content"]
        assert joined(events, 0) == texts[name]
    assert texts["tiny"] != texts["all"]


def test_beams(server: Served):
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "use_beam_search": True, "n": 2}
    texts = {}
    for name in ("tiny", "all"):
        answer = server.post(PATH, body | {"model": name, "max_tokens": 8}).json
        assert answer["model"] == name
        texts[name] = [each["message"]["content"] for each in answer["choices"]]
    assert texts["tiny"] != texts["all"]
    answer = server.post(PATH, body | {"max_tokens": 3, "allowed_token_ids": [7]}).json
    assert [each["message"]["content"] for each in answer["choices"]] == [
        server.post("/detokenize", {"tokens": [7, 7, 7]}).json["prompt"]
    ]


def test_grpc_takes_their_names_too(server: Served):
    body = {"prompt": prompt_of(CASE), "temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    with grpc_opened(server) as address, client_of(address) as client:
        for name in ("all", "mlp"):
            answer = client.whole(message_of(body | {"model": name}))
            assert list(answer.outputs[0].token_ids) == golden_of(name, CASE).tokens
            assert answer.prompt_info.model == name
        assert client.whole(message_of(body)).prompt_info.model == "tiny"
        code, _, metadata = refusal(lambda: client.whole(message_of(body | {"model": "other"})))
    assert (code, metadata["param"]) == (grpc.StatusCode.NOT_FOUND, "model")


def test_adapters_come_and_go(server: Served):
    path = str(ADAPTERS / CASE / "attention")
    assert server.post(LOAD, {"lora_name": "attention", "lora_path": path}).status == 200
    assert tokens(server, "attention") == golden_of("attention", CASE).tokens
    again = server.post(LOAD, {"lora_name": "attention", "lora_path": path})
    assert (again.status, again.json["error"]["param"]) == (400, "lora_name")
    other = {"lora_name": "attention", "lora_path": str(ADAPTERS / CASE / "rank-8"), "load_inplace": True}
    assert server.post(LOAD, other).status == 200
    assert tokens(server, "attention") == golden_of("rank-8", CASE).tokens
    assert server.post(UNLOAD, {"lora_name": "attention"}).status == 200
    gone = server.post("/v1/completions", {"model": "attention", "prompt": "a"})
    assert (gone.status, gone.json["error"]["param"]) == (404, "model")
    assert server.post(UNLOAD, {"lora_name": "attention"}).status == 404


def test_bad_ones_are_refused_and_change_nothing(server: Served, tmp_path: Path):
    before = server.get("/v1/models").json
    (broken := tmp_path / "broken").mkdir()
    (broken / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    for body, parameter in (
        ({"lora_name": "tiny", "lora_path": str(ADAPTERS / CASE / "all")}, "lora_name"),
        ({"lora_name": "bad"}, None),
        ({"lora_name": "bad", "lora_path": ""}, "lora_path"),
    ):
        answer = server.post(LOAD, body)
        assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.body
    for path, status, kind in (
        (tmp_path / "none", 404, "NotFoundError"),
        (tmp_path, 404, "NotFoundError"),
        (broken, 500, "InternalServerError"),
    ):
        answer = server.post(LOAD, {"lora_name": "bad", "lora_path": str(path)})
        assert (answer.status, answer.json["error"]["type"]) == (status, kind), answer.body
        expected = f"Loading lora bad failed: No adapter found for {path}" if status == 404 else "IA3"
        assert expected in answer.json["error"]["message"]
    assert server.get("/v1/models").json == before


def test_the_routes_have_to_be_allowed(monkeypatch: pytest.MonkeyPatch):
    names = ("JAXLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name in names:
        for value, is_allowed in (("", False), ("0", False), ("1", True), ("true", True)):
            monkeypatch.setenv(name, value)
            paths = {getattr(route, "path", None) for route in build_app(command_line()).routes}
            assert {LOAD, UNLOAD} <= paths if is_allowed else paths.isdisjoint({LOAD, UNLOAD})
        monkeypatch.delenv(name)


def test_modules_on_the_command_line():
    assert LoRAModule.read("a=b=c") == LoRAModule(name="a", path="b=c")
    for text in ("a", '{"name": "a"}', "{", '{"name": 1, "path": "b"}'):
        with pytest.raises(VLLMValidationError, match="lora_modules"):
            LoRAModule.read(text)

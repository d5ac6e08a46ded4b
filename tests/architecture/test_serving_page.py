"""The pages of the server list every route, flag of the server and field of requests, and no others."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
import pytest
from starlette.routing import Route

from jaxllm.cli.config_file import apply_config_file
from jaxllm.cli.main import make_parser
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.server.app import build_app
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.completion_protocol import CompletionRequest
from jaxllm.server.pooling.classification_protocol import ClassificationRequest
from jaxllm.server.pooling.cohere_protocol import CohereEmbedRequest
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
from jaxllm.server.pooling.pooling_protocol import PoolingRequest
from jaxllm.server.pooling.scoring_protocol import RerankRequest, ScoreRequest
from tests.architecture.sources import ROOT

NAMES = ("serving", "api", "grpc", "security", "operations", "metrics", "commands", "agents", "lora")
PAGE = "\n".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in NAMES)
OF_OPENAI = frozenset(
    ("messages", "prompt", "model", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed",
     "stop", "max_tokens", "max_completion_tokens", "logit_bias", "logprobs", "top_logprobs", "response_format",
     "stream", "stream_options", "tools", "tool_choice", "modalities")
)  # fmt: skip
"""Fields that the pages leave to OpenAI's documentation."""


def rows(heading: str) -> str:
    """Return the first cells of the tables below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return " ".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `"))


def test_every_route_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("JAXLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    app = build_app(argparse.Namespace())
    for_browsers = {"/", "/docs", "/redoc", "/openapi.json"}
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    served = {*app.openapi()["paths"], *(paths & for_browsers)}
    assert set(re.findall(r"`(?:[A-Z]+ )?(/[\w/{}.]*)`", rows("Routes"))) == served


def test_every_flag_of_the_server_is_there_and_no_other():
    flags = {"--" + name.replace("_", "-") for name in ServerArgs.__annotations__}
    assert flags <= set(re.findall(r"`(--[a-z][\w-]*)", rows("Flags")))
    known = {flag for parser in make_parser()[1].values() for flag in parser._option_string_actions}
    told = re.findall(r"`(--[a-z][\w-]*)", PAGE)
    assert [flag for flag in told if flag not in known] == []


def test_the_file_of_flags_is_read(tmp_path: Path):
    [example] = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if block.startswith("model:")]
    file = tmp_path / "serve.yaml"
    file.write_text(example, encoding="utf-8")
    parser, commands = make_parser()
    apply_config_file(commands["serve"], ["--config", str(file)])
    args = parser.parse_args(["serve", "--config", str(file)])
    assert (args.served_model_name, args.max_model_len) == (["smollm2", "small"], 4096)


def test_every_field_beyond_openai_s_is_there():
    kinds = (ChatCompletionRequest, CompletionRequest)
    fields = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    section = PAGE.split("\n## Requests\n")[1].split("\n## ")[0]
    assert fields > OF_OPENAI
    assert fields - OF_OPENAI - set(re.findall(r"`(\w+)`", section)) == set()


def test_every_field_of_requests_to_models_that_pool_is_there():
    kinds = (EmbeddingRequest, PoolingRequest, ClassificationRequest, ScoreRequest, RerankRequest, CohereEmbedRequest)
    fields = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    section = PAGE.split("\n## Embeddings and scores\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    assert fields - set(re.findall(r"`(\w+)`", " ".join(table))) == set()

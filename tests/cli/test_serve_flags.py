"""`jaxllm serve` takes vLLM's flags, and a file of them: each flag works or is refused by name."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.config_file import apply_config_file
from jaxllm.cli.main import main, make_parser
from jaxllm.cli.serve import check_serve_args
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_client import build_async_engine_client
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.utils.argparse_utils import FlexibleArgumentParser
from tests.slurm import slurm_variables

WORKS = re.findall(
    r"-\S+",
    """
    --host --port --uds --uvicorn-log-level --disable-uvicorn-access-log --disable-access-log-for-endpoints
    --allow-credentials --allowed-origins --allowed-methods --allowed-headers --api-key --ssl-keyfile --ssl-certfile
    --ssl-ca-certs --enable-ssl-refresh --ssl-cert-reqs --ssl-ciphers --root-path --middleware
    --enable-request-id-headers --disable-fastapi-docs --h11-max-incomplete-event-size --h11-max-header-count
    --api-server-count -asc
    --chat-template --chat-template-content-format --trust-request-chat-template --default-chat-template-kwargs
    --response-role --return-tokens-as-token-ids --log-config-file --max-log-len --enable-prompt-tokens-details
    --enable-server-load-tracking --enable-force-include-usage --enable-tokenizer-info-endpoint
    --disable-frontend-multiprocessing --enable-log-requests --disable-log-requests --disable-log-stats
    --enable-auto-tool-choice --exclude-tools-when-tool-choice-none --tool-call-parser --tool-parser-plugin
    --reasoning-parser --max-num-queued-reqs --max-num-queued-tokens --shutdown-timeout --served-model-name
    --config --model --tensor-parallel-size -tp --device-memory-utilization
    """,
)
"""Flags of vLLM's server that have an effect here."""
REFUSED = {
    "--tool-server": "demo",
    "--enable-log-outputs": None,
    "--enable-per-request-metrics": None,
    "--log-error-stack": None,
    "--tokens-only": None,
    "--fingerprint-mode": "full",
    "--fingerprint-value": "x",
    "--cohere-format": "cmd3",
    "--enable-offline-docs": None,
    "--data-parallel-supervisor-port": "1",
    "--dp-supervisor-probe-interval-s": "1",
    "--dp-supervisor-probe-timeout-s": "1",
    "--dp-supervisor-probe-failure-threshold": "1",
    "--pipeline-parallel-size": "2",
    "-pp": "2",
}
"""Flags of vLLM's server that have none yet, each with a value that is not its default; switches have none."""


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


def parse(parser: argparse.ArgumentParser, *words: str) -> argparse.Namespace:
    apply_config_file(parser, list(words))
    return parser.parse_args(words)


def test_every_flag_of_vllms_server_is_known(parser: FlexibleArgumentParser):
    known = parser._option_string_actions
    assert [flag for flag in (*WORKS, *REFUSED) if flag not in known] == []
    assert known.keys() <= make_parser()[1]["serve"]._option_string_actions.keys(), "the command has all of them"


def test_what_does_not_work_is_refused_by_name(parser: FlexibleArgumentParser):
    for flag, value in REFUSED.items():
        args = parser.parse_args(["m", flag, *([] if value is None else [value])])
        with pytest.raises(VLLMValidationError, match="is not supported: ") as refused:
            check_serve_args(args)
        assert refused.value.parameter == parser._option_string_actions[flag].dest


def test_what_means_the_default_is_taken(parser: FlexibleArgumentParser):
    words = ("--no-enable-log-outputs", "--api-server-count", "1", "-dp", "1", "--cohere-format", "cmd4")
    check_serve_args(parse(parser, "m", *words, "--no-enable-log-deltas"))


def test_the_first_word_beats_the_flag(parser: FlexibleArgumentParser):
    args = parse(parser, "first", "--model", "second")
    check_serve_args(args)
    assert AsyncEngineArgs.from_cli_args(args).model == "first"
    with pytest.raises(VLLMValidationError, match="say which MODEL"):
        check_serve_args(parse(parser))


FILE = """
model: from-file
host: 127.0.0.1
port: 6379
uvicorn-log-level: warning
enable_log_requests: true
enable-prefix-caching: false
disable-fastapi-docs: true
max-model-len: 25.6k
max-num-queued-tokens: 1K
max-num-batched-tokens: 1k
device-memory-utilization: 0.5
served-model-name: [one, two]
api-key: [a, b]
allowed-origins: ["https://a.example"]
middleware: [a.b, c.d]
default-chat-template-kwargs:
  enable_thinking: false
  nested: {list: [1, 2]}
hf-overrides: {rope_parameters: {rope_theta: 5.0}}
"""


def test_a_file_of_flags(parser: FlexibleArgumentParser, tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text(FILE)
    args = parse(parser, "--config", str(file))
    check_serve_args(args)
    engine, server = AsyncEngineArgs.from_cli_args(args), ServerArgs.from_cli_args(args)
    assert (engine.model, engine.enable_log_requests, engine.enable_prefix_caching) == ("from-file", True, False)
    assert (engine.max_model_len, engine.max_num_queued_tokens, engine.max_num_batched_tokens) == (25_600, 1024, 1000)
    assert (engine.gpu_memory_utilization, engine.served_model_name) == (0.5, ["one", "two"])
    assert engine.hf_overrides == {"rope_parameters": {"rope_theta": 5.0}}
    assert (server.host, server.port, server.uvicorn_log_level) == ("127.0.0.1", 6379, "warning")
    assert (server.api_key, server.allowed_origins) == (["a", "b"], ["https://a.example"])
    assert (server.disable_fastapi_docs, server.middleware) == (True, ["a.b", "c.d"])
    assert server.default_chat_template_kwargs == {"enable_thinking": False, "nested": {"list": [1, 2]}}
    assert server.timeout_keep_alive == 5, "what neither says is as ever"


def test_the_command_line_beats_the_file(parser: FlexibleArgumentParser, tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text(FILE)
    words = ("--port", "1", "--no-disable-fastapi-docs", "--middleware", "e.f", "--middleware", "g.h", "i.j")
    args = parse(parser, "mine", "--config", str(file), *words, "--api-key", "c", "--max-model-len", "4K")
    check_serve_args(args)
    server = ServerArgs.from_cli_args(args)
    assert (args.model, args.max_model_len, server.port) == ("mine", 4096, 1)
    assert (server.disable_fastapi_docs, server.middleware, server.api_key) == (False, ["e.f", "g.h", "i.j"], ["c"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tool-call-parsr: hermes", "Did you mean 'tool-call-parser'"),
        ("no-enable-prefix-caching: true", "no flag is called 'no-enable-prefix-caching'"),
        ("help: max", "no flag is called 'help'"),
        ("tool-server: demo", "tool_server='demo' is not supported"),
        ("enable-log-outputs: true", "enable_log_outputs=True is not supported"),
        ("port: [1, 2]", "port"),
    ],
)
def test_files_that_cannot_be_served(parser: FlexibleArgumentParser, text: str, message: str, tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(VLLMValidationError, match=message):
        check_serve_args(parse(parser, "m", "--config", str(file)))


def test_programs_that_parse_for_themselves():
    """They do as vLLM's scripts do: a parser of their own, the flags, the check, then `run_server`."""
    parser = make_arg_parser(FlexibleArgumentParser(description="mine"))
    args = parser.parse_args(["m", "--max_model_len", "4k", "--port", "0"])
    validate_parsed_serve_args(args)
    assert (args.model, args.max_model_len, args.port) == ("m", 4000, 0)
    with pytest.raises(VLLMValidationError, match="tool_server"):
        validate_parsed_serve_args(parser.parse_args(["m", "--tool-server", "demo"]))


def test_one_command_serves_on_all_hosts(parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch):
    for rank, words in ((0, ()), (1, ()), (1, ("--headless",))):
        for name, value in slurm_variables(2, rank, "node1,node2").items():
            monkeypatch.setenv(name, value)
        args = parser.parse_args(["m", "--nnodes", "auto", *words])
        for engine_args in (check_serve_args(args), AsyncEngineArgs.from_cli_args(args)):
            assert (engine_args.nnodes, engine_args.node_rank, engine_args.master_addr) == (2, rank, "node1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(VLLMValidationError, match="host 0 has the server"):
        check_serve_args(parser.parse_args(["m", "--nnodes", "auto", "--headless"]))


def test_the_core_can_be_a_thread_of_the_server(parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch):
    class SeenError(Exception):
        pass

    def start(_engine_args: AsyncEngineArgs, **settings: Any) -> None:
        raise SeenError(settings["disable_frontend_multiprocessing"])

    async def enter(args: argparse.Namespace) -> None:
        async with build_async_engine_client(args):
            pass

    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    for words, is_thread in (((), False), (("--disable-frontend-multiprocessing",), True)):
        with pytest.raises(SeenError) as seen:
            asyncio.run(enter(parser.parse_args(["--model", "m", *words])))
        assert seen.value.args == (is_thread,)


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "say which MODEL"), (("--model", "m", "--headless"), "host 0 has the server")],
)
def test_vllms_module_is_the_same_command(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from jaxllm.entrypoints.openai import api_server

    monkeypatch.setattr(sys, "argv", ["api_server", *words])
    assert api_server.main() == main(["serve", *words]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert message in first


@pytest.mark.server
def test_vllms_module_runs_and_is_light():
    modules = ("jaxllm.entrypoints.openai.api_server", "jaxllm.entrypoints.openai.cli_args")
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"jax", "fastapi", "uvicorn", "transformers", "numpy"}.isdisjoint(done.stdout.split())
    command = [sys.executable, "-m", modules[0], "--model", "m", "-tp", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("jaxllm: error: tensor_parallel_size")

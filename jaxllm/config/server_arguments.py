"""The server's arguments: vLLM's flags for its front end, besides those of the engine."""

# Fields are declared by calls that make dataclass fields, which ruff takes for shared default values.
# ruff: noqa: RUF009

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any, Self

from jaxllm.config.formats import CONTENT_FORMATS
from jaxllm.config.kinds import (
    Choice,
    Integer,
    Json,
    JsonNames,
    Names,
    Number,
    Switch,
    Text,
    add_flags,
    argument,
    check_fields,
)
from jaxllm.config.unsupported_server_arguments import UnsupportedServerArguments
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX

_FRONTEND = "Frontend"
CHAT_GROUP = "Frontend: chat"
_CORS = "Frontend: CORS"
_TLS = "Frontend: TLS"
_LOG = "Frontend: log"
DEFAULT_LOG_LEVEL = "info"
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LIMITS = "Frontend: limits"
MAX_QUEUED = 16_384
"""The default of --max-num-queued-reqs for a server: the most sequences at once, since each takes memory."""


@dataclasses.dataclass(kw_only=True)
class ServerArgs(UnsupportedServerArguments):
    """The arguments of `jaxllm serve` besides the engine's. They are checked when made, like `EngineArgs`.

    Each of vLLM's arguments works, or is refused by name (`unsupported_server_arguments.py`).
    """

    host: str | None = argument(None, Text(), _FRONTEND, "address to listen on; by default all of this machine's")
    port: int = argument(8000, Integer(0, 65535), _FRONTEND, "port; 0 takes any that is free, and says which")
    grpc_port: int | None = argument(
        None, Integer(0, 65535, optional=True), _FRONTEND, "port for gRPC, beside HTTP; 0 takes any that is free"
    )
    api_server_count: int | None = argument(
        None,
        Integer(1, 64, optional=True),
        _FRONTEND,
        "front-end processes on one port, for one engine; by default one, in this process",
        "-asc",
    )
    models: str | None = argument(
        None, Text(), _FRONTEND, "YAML or JSON file of the models to serve: their names, each with what it is and flags"
    )
    max_loaded_models: int | None = argument(
        None, Integer(1, 4096, optional=True), _FRONTEND, "most models loaded at once, of several; by default one"
    )
    models_memory: int | None = argument(
        None,
        Integer(1, 2**63 - 1, optional=True, sized=True),
        _FRONTEND,
        "bytes that the loaded models of several may take together, as 8G",
    )
    headless: bool = argument(
        False, Switch(), _FRONTEND, "have no server: with --node-rank above 0, where there is none anyway"
    )
    disable_fastapi_docs: bool = argument(False, Switch(), _FRONTEND, "have neither /docs nor /redoc nor /openapi.json")
    enable_pull: bool = argument(
        False, Switch(), _FRONTEND, "let clients download and delete models by Ollama's /api/pull and /api/delete"
    )
    disable_page: bool = argument(False, Switch(), _FRONTEND, "have no page of status and chat at /")
    uds: str | None = argument(None, Text(), _FRONTEND, "path of a Unix socket to listen on instead of host and port")
    lora_modules: list[str] | None = argument(
        None,
        Names("NAME=PATH", single=True),
        _FRONTEND,
        "LoRA adapters that requests name as models; or as JSON",
    )
    api_key: list[str] | None = argument(None, Names("KEY"), _FRONTEND, "API keys; each request must bring one of them")
    api_key_file: str | None = argument(None, Text(), _FRONTEND, "file with keys, one per line")
    root_path: str | None = argument(None, Text(), _FRONTEND, "path that a proxy in front of the server takes off")
    disable_frontend_multiprocessing: bool = argument(
        False, Switch(), _FRONTEND, "run the engine's core in a thread of the server's process, not in its own"
    )
    middleware: list[str] | None = argument(
        None, Names("NAME", repeats=True), _FRONTEND, "dotted names of ASGI middleware, classes or async functions"
    )
    allowed_origins: list[str] = argument(
        [], JsonNames(), _CORS, "origins whose pages may use the server; by default none but its own"
    )
    allowed_hosts: list[str] = argument(
        [],
        JsonNames(),
        _CORS,
        "names that requests may have in Host, beside local ones and addresses; by default any, but on loopback none",
    )
    allowed_methods: list[str] = argument([], JsonNames(), _CORS, "methods that such pages may use; by default all")
    allowed_headers: list[str] = argument([], JsonNames(), _CORS, "headers that such pages may send; by default all")
    allow_credentials: bool = argument(False, Switch(), _CORS, "let such pages send cookies and keys of the browser's")
    ssl_keyfile: str | None = argument(None, Text(), _TLS, "file of the private key")
    ssl_certfile: str | None = argument(None, Text(), _TLS, "file of the certificate, with those that vouch for it")
    ssl_ca_certs: str | None = argument(None, Text(), _TLS, "file of the authorities of clients' certificates")
    ssl_cert_reqs: int = argument(
        0, Integer(0, 2), _TLS, "whether clients need a certificate: 0 no, 1 it is checked if there is one, 2 yes"
    )
    ssl_ciphers: str | None = argument(None, Text(), _TLS, "ciphers, as OpenSSL writes them")
    enable_ssl_refresh: bool = argument(False, Switch(), _TLS, "read certificate and key again when their files change")
    uvicorn_log_level: str = argument(
        DEFAULT_LOG_LEVEL, Choice(_LOG_LEVELS), _LOG, "what is logged of connections and requests"
    )
    disable_uvicorn_access_log: bool = argument(False, Switch(), _LOG, "log no line for each request")
    disable_access_log_for_endpoints: str | None = argument(
        None, Text(), _LOG, "paths whose requests have no line in the log, separated by commas, as /health,/metrics"
    )
    enable_request_id_headers: bool = argument(False, Switch(), _LOG, "send X-Request-Id with every answer")
    enable_server_load_tracking: bool = argument(False, Switch(), _LOG, "has no effect: /load always counts")
    timeout_keep_alive: int = argument(5, Integer(1, 3600), _LIMITS, "seconds that a connection may rest")
    header_timeout: float = argument(10.0, Number(0.0, 3600.0, above_low=True), _LIMITS, "seconds for a request's head")
    stalled_client_timeout: float = argument(
        60.0, Number(0.0, 3600.0, above_low=True), _LIMITS, "seconds that a client may leave what is sent unread"
    )
    h11_max_incomplete_event_size: int = argument(
        65_536, Integer(1024, INT32_MAX, sized=True), _LIMITS, "most bytes of a request's head"
    )
    h11_max_header_count: int = argument(100, Integer(1, 65_536), _LIMITS, "most headers of a request")
    max_body_size: int = argument(
        32 * 2**20, Integer(1024, INT32_MAX, sized=True), _LIMITS, "most bytes of a request's body"
    )

    chat_template_content_format: str = argument(
        "auto",
        Choice(CONTENT_FORMATS),
        CHAT_GROUP,
        "how templates get a message's content: auto looks what they expect",
    )
    default_chat_template_kwargs: dict[str, Any] = argument(
        {}, Json(), CHAT_GROUP, "variables of the chat template, as JSON; a request's chat_template_kwargs go over them"
    )
    trust_request_chat_template: bool = argument(False, Switch(), CHAT_GROUP, "run chat templates that requests bring")
    enable_tokenizer_info_endpoint: bool = argument(
        False, Switch(), CHAT_GROUP, "show the tokenizer, chat template included, at /tokenizer_info"
    )
    enable_auto_tool_choice: bool = argument(
        False, Switch(), CHAT_GROUP, "has no effect: requests with tools may always call them, or not"
    )
    tool_call_parser: str | None = argument(
        None,
        Text(),
        CHAT_GROUP,
        "how the model writes tool calls; by default, or with auto, as its chat template tells",
    )
    tool_parser_plugin: str | None = argument(None, Text(), CHAT_GROUP, "Python file that registers more tool parsers")
    exclude_tools_when_tool_choice_none: bool = argument(
        False, Switch(), CHAT_GROUP, "hide the tools from the chat template if tool_choice is 'none'"
    )
    sse_ping_interval: float = argument(
        15.0, Number(0.0, 3600.0), CHAT_GROUP, "seconds between comments in a stream that has no token yet; 0 for none"
    )
    response_role: str = argument("assistant", Text(optional=False), CHAT_GROUP, "role of the answer")
    enable_prompt_tokens_details: bool = argument(False, Switch(), CHAT_GROUP, "show cached prompt tokens in the usage")
    enable_force_include_usage: bool = argument(
        False, Switch(), CHAT_GROUP, "show the usage in every event of a stream"
    )
    return_tokens_as_token_ids: bool = argument(
        False, Switch(), CHAT_GROUP, 'show the tokens of log-probabilities as "token_id:5"'
    )

    metrics_prefix: str = argument(
        "vllm:", Text(optional=False), _FRONTEND, "what the names of the engine's metrics begin with, at /metrics"
    )

    def __post_init__(self) -> None:
        """Check every argument. Raises VLLMValidationError."""
        check_fields(self)
        if not _METRIC_NAME.fullmatch(self.metrics_prefix):
            message = f"metrics_prefix={self.metrics_prefix!r} cannot begin a metric's name: use letters, _ and :."
            raise VLLMValidationError(message, parameter="metrics_prefix", value=self.metrics_prefix)
        if self.allow_credentials and "*" in self.allowed_origins:
            message = "allow_credentials cannot go with the origin '*': name the origins that are trusted."
            raise VLLMValidationError(message, parameter="allow_credentials", value=True)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            message = f"root_path={self.root_path!r} must begin with a slash, and not end in one."
            raise VLLMValidationError(message, parameter="root_path", value=self.root_path)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag per argument."""
        add_flags(parser, dataclasses.fields(cls))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Make the arguments from a parsed command line; missing ones have their defaults."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def with_queue_bound(args: argparse.Namespace) -> argparse.Namespace:
    """Return a command line with a bound on waiting and running requests, by default MAX_QUEUED.

    An engine that a program makes has no bound by default.
    """
    if getattr(args, "max_num_queued_reqs", None) is not None:
        return args
    return argparse.Namespace(**{**vars(args), "max_num_queued_reqs": MAX_QUEUED})

"""`jaxllm run-batch` answers a file of requests in OpenAI's batch format, as a server would."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxllm.cli.batch.jobs import Job, read_lines
from jaxllm.cli.batch.journal import Journal, output_path
from jaxllm.cli.batch.progress import Counts, Progress
from jaxllm.cli.batch.result_files import overwriting
from jaxllm.cli.flags.engine_flags import read_engine_args, result_settings
from jaxllm.cli.flags.help import add_help
from jaxllm.config.kinds import add_flags
from jaxllm.config.server_arguments import ServerArgs, with_queue_bound
from jaxllm.config.unsupported_server_arguments import UnsupportedServerArguments
from jaxllm.exceptions import EngineBusyError, EngineDeadError, VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.speech.paths import SPEECH_TASKS
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.streams import say

if TYPE_CHECKING:
    from jaxllm.engine.online.async_llm import AsyncLLM
    from jaxllm.server.http.caller import Caller

_QUEUE_LENGTH = 1024
"""The default number of requests in the engine at a time; twice its batch, if that is more."""
_BUSY_SECONDS = 0.1
"""The pause before a retry of a request that the engine refused because it was full."""
CHAT_URL, COMPLETION_URL, EMBEDDING_URL = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSE_URL, SYSTEMONE_URL, DECISION_URL = "/v1/responses", "/v1/systemone", "/v1/decisions"
_URLS = f"{CHAT_URL}, {RESPONSE_URL}, {COMPLETION_URL}, {SYSTEMONE_URL}, {DECISION_URL}, {EMBEDDING_URL}, "
_URLS += f"{', '.join(SPEECH_TASKS)}, or end in /score or /rerank"
_METRICS_FLAGS = ("host", "port", "metrics_prefix")
_SERVER_FLAGS = (
    "lora_modules",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "response_role",
    "enable_prompt_tokens_details",
    "return_tokens_as_token_ids",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "tool_parser_plugin",
    "exclude_tools_when_tool_choice_none",
)
"""The server's arguments that change answers."""

type _MakeEngine = Callable[[argparse.Namespace], AbstractAsyncContextManager[AsyncLLM]]


class BatchLine(msgspec.Struct, frozen=True):
    """A line of a batch file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Label(msgspec.Struct, frozen=True):
    """The part of an invalid line that its error record shows."""

    custom_id: Any = None


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests in OpenAI's batch format",
        description="Answer a file of requests, one per line with custom_id, method, url and body, on one engine in "
        f"this process. URLs are {_URLS}. A killed run resumes when started again.",
        epilog="A request that fails has its error in its line of the output. Exit statuses: 0 all requests are "
        "answered or have failed, 2 misuse, 3 the engine has ended, 4 results could not be written, 130 interrupted.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-i", "--input-file", metavar="FILE", help="requests, one JSON object a line")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="answers, in the order of the requests")
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="hub id, folder, or .gguf file")
    parser.add_argument("--config", metavar="FILE.yaml", help="flags and their values; the command line wins")
    parser.add_argument(
        "--max-inflight", type=int, metavar="N", help=f"most requests in the engine; by default {_QUEUE_LENGTH} or more"
    )
    parser.add_argument(
        "--enable-metrics", action="store_true", help="serve metrics to Prometheus at --host and --port, without a key"
    )
    refused = {each.name for each in dataclasses.fields(UnsupportedServerArguments)}
    taken = {*_SERVER_FLAGS, *_METRICS_FLAGS, *refused}
    add_flags(parser, tuple(each for each in dataclasses.fields(ServerArgs) if each.name in taken))
    AsyncEngineArgs.add_cli_args(parser)
    add_help(parser, AsyncEngineArgs, ServerArgs)
    parser.set_defaults(run=run, disable_log_stats=True)
    return parser


def run(args: argparse.Namespace, make_engine: _MakeEngine | None = None) -> int:
    """Answer all requests and return the exit status. Arguments and files are checked before the model loads."""
    from jaxllm.server.openai.output_parsers import check_parsers

    if args.enable_metrics:
        args.disable_log_stats = False  # the metrics come from these statistics
    engine_args = read_engine_args(args, AsyncEngineArgs)
    server_args = ServerArgs.from_cli_args(args)
    for flag in ("input_file", "output_file"):
        if getattr(args, flag) is None:
            raise VLLMValidationError(f"say --{flag.replace('_', '-')} FILE.", parameter=flag)
    if args.max_inflight is not None:
        check_int("max_inflight", args.max_inflight, 1, INT32_MAX)
    check_parsers(server_args)
    jobs = [Job(i, line, True) for i, line in enumerate(read_lines(args.input_file, "input-file"))]
    output = output_path(args.output_file, args.input_file, flag="output-file")
    shown = [getattr(server_args, name) for name in _SERVER_FLAGS]
    settings = result_settings(engine_args, engine_args.served_model_name, args.reasoning_parser, shown)
    keys = [job.key(settings) for job in jobs]
    with Journal(output, keys, opens=overwriting) as journal:
        todo = [job for job in jobs if job.index not in journal.done]
        if len(todo) < len(jobs):
            say(f"{len(jobs) - len(todo)} of {len(jobs)} requests are done already.")
        counts = Counts()
        again = "Start the same command again to go on."
        if todo:
            try:
                answering = _answer_all(args, server_args, make_engine or _start, _Batch(keys, todo, journal, counts))
                asyncio.run(answering)
            except KeyboardInterrupt:
                say(f"interrupted: {len(journal.done)} of {len(jobs)} requests are done. {again}")
                return 130
            except EngineDeadError as error:
                say(f"jaxllm: error: {error} {len(journal.done)} of {len(jobs)} requests are done. {again}")
                return 3
        journal.finish()
    if counts.failed:
        say(f"{counts.failed} of {len(jobs)} requests failed; their lines hold the errors.")
    return 0


class _Batch(NamedTuple):
    """The requests of a run and where their results go."""

    keys: Sequence[str]
    """The journal keys of all lines of the file."""
    todo: Sequence[Job]
    journal: Journal
    counts: Counts


@asynccontextmanager
async def _start(args: argparse.Namespace) -> AsyncIterator[AsyncLLM]:
    from jaxllm.engine.online.async_client import build_async_engine_client

    args = with_queue_bound(args)
    async with build_async_engine_client(args, usage_context=UsageContext.OPENAI_BATCH_RUNNER) as engine:
        yield engine


async def _answer_all(args: argparse.Namespace, server_args: ServerArgs, make: _MakeEngine, batch: _Batch) -> None:
    """Answer requests, many at a time. Raises EngineDeadError and OutputError."""
    async with make(args) as engine, _metrics(engine, args, server_args):
        limit = args.max_inflight or max(_QUEUE_LENGTH, 2 * engine.vllm_config.scheduler_config.max_num_seqs)
        answers = Answers(engine, server_args, args.served_model_name, args.reasoning_parser)
        await answers.load_adapters()
        waiting = iter(batch.todo)
        total = len(batch.keys)
        with Progress(total, total - len(batch.todo), shown=True) as advance:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(limit, len(batch.todo))):
                        group.create_task(_work(answers, waiting, batch, advance))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None


@asynccontextmanager
async def _metrics(engine: AsyncLLM, args: argparse.Namespace, server_args: ServerArgs) -> AsyncIterator[None]:
    """Serve the engine's metrics during the run, if enabled. Raises VLLMValidationError for an address in use."""
    if not args.enable_metrics:
        yield
        return
    from prometheus_client import start_http_server

    from jaxllm.server.operations.prometheus import CoreProcesses, EngineCollector, OnLoop, make_registry

    registry, loop = make_registry(), asyncio.get_running_loop()
    for collector in (EngineCollector(engine, server_args.metrics_prefix), CoreProcesses(engine)):
        registry.register(OnLoop(collector, loop))
    try:
        server, thread = start_http_server(server_args.port, server_args.host or "0.0.0.0", registry)
    except OSError as error:
        message = f"metrics cannot be served at port {server_args.port}: {error.strerror}. Choose another --port."
        raise VLLMValidationError(message, parameter="port", value=server_args.port) from error
    say(f"metrics are at port {server.server_port}.")
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


async def _work(
    answers: Answers, waiting: Iterator[Job], batch: _Batch, advance: Callable[[int, Counts], None]
) -> None:
    """Answer requests one after another."""
    for job in waiting:
        record, is_good = await answers.record(job, "batch_req_" + batch.keys[job.index])
        usage = getattr(record["response"]["body"], "usage", None)
        batch.counts.prompt_tokens += getattr(usage, "prompt_tokens", 0) or getattr(usage, "input_tokens", 0)
        batch.counts.output_tokens += getattr(usage, "completion_tokens", 0) or getattr(usage, "output_tokens", 0)
        batch.counts.failed += not is_good
        (batch.journal.put if is_good else batch.journal.fail)(job.index, record)
        advance(1, batch.counts)


class Answers:
    """Answers lines of a batch file with a server's request handlers."""

    def __init__(
        self, engine: AsyncLLM, server_args: ServerArgs, names: Sequence[str] | None, reasoning_parser: str
    ) -> None:
        from jaxllm.server.decisions.serving import ServingDecisions
        from jaxllm.server.openai.serving_chat import OpenAIServingChat
        from jaxllm.server.openai.serving_completion import OpenAIServingCompletion
        from jaxllm.server.openai.serving_models import LoRAModule, OpenAIServingModels
        from jaxllm.server.pooling.serving import PooledServing
        from jaxllm.server.responses.kept import KeptResponses
        from jaxllm.server.responses.serving import OpenAIServingResponses
        from jaxllm.server.speech.serving import OpenAIServingTranscription

        self._models = models = OpenAIServingModels(engine.model_config, names)
        self._modules = list(map(LoRAModule.read, server_args.lora_modules or []))
        self._engine = engine
        self._chat = OpenAIServingChat(engine, models, server_args, reasoning_parser)
        self._completion = OpenAIServingCompletion(engine, models, server_args)
        self._responses = OpenAIServingResponses(self._chat, KeptResponses(), nullcontext)
        self._decisions = ServingDecisions(self._chat)
        self._pooled = PooledServing.of(self._chat, server_args)
        self._speech = OpenAIServingTranscription.of(self._chat)

    async def load_adapters(self) -> None:
        """Load the adapters of --lora-modules. Raises VLLMValidationError."""
        await self._models.add_all(self._engine, self._modules)

    async def record(self, job: Job, request_id: str) -> tuple[dict[str, Any], bool]:
        """Return a line's output record and whether it is a success. Raises EngineDeadError."""
        from jaxllm.server.http.errors import error_response

        try:
            body, status, error = await self._answer(job, request_id), 200, None
        except EngineDeadError:
            raise
        except Exception as failure:  # noqa: BLE001 - each has an answer
            body = error_response(failure)
            status, error = body.error.code, body.error
        response = {"status_code": status, "request_id": request_id, "body": body}
        return {"id": request_id, "custom_id": _custom_id(job), "response": response, "error": error}, error is None

    async def _answer(self, job: Job, request_id: str) -> Any:
        from jaxllm.server.http.caller import Caller
        from jaxllm.server.http.decoding import decode
        from jaxllm.server.openai.chat_protocol import CHAT_REFUSED, ChatCompletionRequest
        from jaxllm.server.openai.completion_protocol import COMPLETION_REFUSED, CompletionRequest
        from jaxllm.server.responses.request import RESPONSES_REFUSED, ResponsesRequest

        line, caller = _parse(job), Caller(request_id)
        if line.url == CHAT_URL:
            chat = self._repeatable(decode(bytes(line.body), ChatCompletionRequest, CHAT_REFUSED), job)
            return await self._when_there_is_room(lambda: self._chat.answer(chat, caller))
        if line.url == COMPLETION_URL:
            request = self._repeatable(decode(bytes(line.body), CompletionRequest, COMPLETION_REFUSED), job)
            return await self._when_there_is_room(lambda: self._completion.answer(request, caller))
        if line.url == RESPONSE_URL:
            response = decode(bytes(line.body), ResponsesRequest, RESPONSES_REFUSED)
            if response.stream or response.background:
                name = "stream" if response.stream else "background"
                raise VLLMValidationError(f"{name}: a batch has whole answers alone.", parameter=name, value=True)
            response.store = False  # it cannot be retrieved later
            return await self._when_there_is_room(lambda: self._responses.answer(response, caller))
        if line.url in SPEECH_TASKS:
            return await self._speech_answer(line, caller, job)
        if line.url in (SYSTEMONE_URL, DECISION_URL):
            return await self._when_there_is_room(self._decision(line, caller))
        return await self._when_there_is_room(self._pooled_answer(line, caller))

    async def _speech_answer(self, line: BatchLine, caller: Caller, job: Job) -> Any:
        """Answer a line about the sound at a URL; subtitles are a body of text."""
        from jaxllm.server.http.decoding import decode
        from jaxllm.server.openai.model_tasks import supported
        from jaxllm.server.speech.protocol import BATCH_REFUSED, BatchTranscriptionRequest
        from jaxllm.server.speech.serving import PlainText

        task = SPEECH_TASKS[line.url]
        serving = supported(self._speech, "Transcriptions" if task == "transcribe" else "Translations")
        request = self._repeatable(decode(bytes(line.body), BatchTranscriptionRequest, BATCH_REFUSED), job)
        answer = await self._when_there_is_room(lambda: serving.answer_url(task, request, caller))
        return answer.text if isinstance(answer, PlainText) else answer

    def _decision(self, line: BatchLine, caller: Caller) -> Callable[[], Any]:
        """Return the function that answers a line with questions. Raises VLLMValidationError."""
        from jaxllm.server.decisions.openai_protocol import DECISIONS_REFUSED, DecisionRequest
        from jaxllm.server.decisions.systemone_protocol import SYSTEMONE_REFUSED, SystemOneRequest
        from jaxllm.server.http.decoding import decode

        if line.url == DECISION_URL:
            decision = decode(bytes(line.body), DecisionRequest, DECISIONS_REFUSED)
            return lambda: self._decisions.answer_decision(decision, caller)
        asked = decode(bytes(line.body), SystemOneRequest, SYSTEMONE_REFUSED)
        return lambda: self._decisions.answer_systemone(asked, caller)

    def _pooled_answer(self, line: BatchLine, caller: Caller) -> Callable[[], Any]:
        """Return the function that answers a line for a pooling model. Raises VLLMValidationError for a wrong URL."""
        from jaxllm.server.http.decoding import decode
        from jaxllm.server.openai.model_tasks import supported
        from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
        from jaxllm.server.pooling.pooling_protocol import POOLED_REFUSED
        from jaxllm.server.pooling.scoring_protocol import RERANK_REFUSED, SCORE_REFUSED, RerankRequest, ScoreRequest

        body = bytes(line.body)
        if line.url == EMBEDDING_URL:
            embedding = supported(self._pooled.embedding or self._pooled.token_embedding, "Embeddings")
            inputs = decode(body, EmbeddingRequest, POOLED_REFUSED)
            if inputs.is_in_bytes:
                message = "encoding_format: a batch has answers in JSON alone; use 'base64' or 'float'."
                raise VLLMValidationError(message, parameter="encoding_format", value=inputs.encoding_format)
            return lambda: embedding.answer(inputs, caller)
        if line.url.endswith("/score"):
            scores = supported(self._pooled.scores, "Score")
            pairs = decode(body, ScoreRequest, SCORE_REFUSED)
            return lambda: scores.answer(pairs, caller)
        if line.url.endswith("/rerank"):
            reranker = supported(self._pooled.scores, "Rerank (Score)")
            documents = decode(body, RerankRequest, RERANK_REFUSED)
            return lambda: reranker.answer_rerank(documents, caller)
        raise VLLMValidationError(f"url must be {_URLS}, got {line.url!r}.", parameter="url", value=line.url)

    def _repeatable[T: Any](self, request: T, job: Job) -> T:
        """Return a request with a seed from its line's index, so that a resumed run samples the same."""
        from jaxllm.engine.front.input_processor import mix

        if request.stream:
            raise VLLMValidationError("stream: answers of a batch are not streamed.", parameter="stream", value=True)
        if request.seed is None:
            request.seed = mix(self._engine.model_config.seed, job.index) >> 1
        return request

    async def _when_there_is_room(self, answer: Callable[[], Any]) -> Any:
        """Answer, and wait and retry while the engine is full, as long as other requests are in it."""
        while True:
            try:
                return await answer()
            except EngineBusyError:
                if not self._engine.front.outputs.num_unfinished_requests:
                    raise
                await asyncio.sleep(_BUSY_SECONDS)


def _parse(job: Job) -> BatchLine:
    """Parse a line. Raises VLLMValidationError."""
    try:
        line = msgspec.json.decode(job.line, type=BatchLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The line must be an object with custom_id, method, url and body: {error}."
        raise VLLMValidationError(message) from error
    if line.method != "POST":
        raise VLLMValidationError(f"method must be POST, got {line.method!r}.", parameter="method", value=line.method)
    return line


def _custom_id(job: Job) -> Any:
    try:
        return msgspec.json.decode(job.line, type=_Label).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None

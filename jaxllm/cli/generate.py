"""`jaxllm generate` runs prompts from flags or a file on one engine, and gives results in input order."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxllm.cli.engine_flags import add_engine_flags, read_engine_args, result_settings
from jaxllm.cli.jobs import Job, Task, job_label, jobs_from_prompts, parse_job, read_jobs
from jaxllm.cli.journal import Console, Journal, output_path
from jaxllm.cli.progress import Counts, Progress
from jaxllm.cli.sampling_flags import SAMPLING_FLAGS, add_sampling_flags, given_sampling
from jaxllm.cli.streams import say
from jaxllm.config.engine_args import EngineArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import Logprob
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.utils.argparse_utils import Repeat

QUEUE_LENGTH = 1024
"""How many prompts the engine gets ahead of their turn; more would only delay the first results."""


class Engine(Protocol):
    """The part of an LLMEngine that a run needs."""

    @property
    def front(self) -> Any: ...

    @property
    def vllm_config(self) -> Any: ...

    @property
    def model_config(self) -> Any: ...

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int = 0, grammar_seconds: float
    ) -> Any: ...

    def step(self) -> list[RequestOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def abort_request(self, request_ids: str) -> None: ...

    def shutdown(self) -> None: ...


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="generate text for prompts or a file of them",
        description="Generate text. A run with --output that was killed goes on where it stopped when started again.",
        epilog="A .jsonl line is an object with prompt, prompt_token_ids or messages, and optionally id and any "
        "sampling parameter. A prompt that fails gets a line with its error; the exit status is then 1. "
        "Other statuses: 0 done, 2 misuse, 4 results could not be written, 130 interrupted.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--prompt", action=Repeat, metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--input", metavar="FILE", help="prompts: .jsonl, or .txt with one per line")
    parser.add_argument("--output", metavar="FILE", help="results: .jsonl or .json; default: the terminal")
    parser.add_argument("--chat", action="store_true", help="send each text prompt as a user's chat message")
    sampling = parser.add_argument_group("sampling (--seed below makes it repeatable)")
    add_sampling_flags(sampling, SAMPLING_FLAGS)
    sampling.add_argument("--stop", action=Repeat, metavar="TEXT", help="end an output here; may be repeated")
    sampling.add_argument("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end an output at these tokens")
    add_engine_flags(parser)
    parser.set_defaults(run=run, disable_log_stats=True)
    return parser


def run(args: argparse.Namespace, make_engine: Callable[[EngineArgs], Engine] | None = None) -> int:
    """Generate as the command line says and return the exit status. Everything is checked before the model loads."""
    engine_args = read_engine_args(args)
    flags = _sampling_flags(args)
    SamplingParams(**flags)
    jobs = _read_prompts(args)
    output = _check_output(args)
    settings = result_settings(engine_args, sorted(flags.items()), args.chat)
    sink = Console(len(jobs), sys.stdout) if output is None else Journal(output, [job.key(settings) for job in jobs])
    with sink:
        todo = [job for job in jobs if job.index not in sink.done]
        if len(todo) < len(jobs):
            say(f"{len(jobs) - len(todo)} of {len(jobs)} prompts are done already.")
        counts = Counts()
        if todo:
            engine = (make_engine or _load_engine)(engine_args)
            try:
                counts = Run(engine, sink, flags, args.chat, len(jobs)).finish(todo)
            except KeyboardInterrupt:
                again = "" if output is None else " Start the same command again to go on."
                say(f"interrupted: {len(sink.done)} of {len(jobs)} prompts are done.{again}")
                return 130
            finally:
                engine.shutdown()
        sink.finish()
    return _report(counts, len(jobs), "max_tokens" in flags)


def _load_engine(engine_args: EngineArgs) -> Engine:
    from jaxllm.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(engine_args)


class Run:
    """Feeds prompts to the engine and its results to the sink."""

    def __init__(
        self, engine: Engine, sink: Journal | Console, flags: Mapping[str, Any], chat: bool, num_prompts: int
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._chat = chat
        self._num_prompts = num_prompts
        self._sampling = {**engine.front.ready.default_sampling_params, **flags}
        self._tasks: dict[str, tuple[Job, Task]] = {}
        self._counts = Counts()

    def finish(self, jobs: Sequence[Job]) -> Counts:
        """Run all jobs; at most QUEUE_LENGTH (or twice the engine's batch) are in the engine at a time."""
        limit = max(QUEUE_LENGTH, 2 * self._engine.vllm_config.scheduler_config.max_num_seqs)
        waiting = iter(jobs)
        num_done = self._num_prompts - len(jobs)
        with Progress(self._num_prompts, num_done, shown=self._sink.is_silent) as advance:
            while self._fill(waiting, limit, advance):
                for output in self._engine.step():
                    if output.finished:
                        self._take(output)
                        advance(1, self._counts)
        return self._counts

    def _fill(self, waiting: Iterator[Job], limit: int, advance: Callable[[int, Counts], None]) -> bool:
        """Hand jobs to the engine until `limit` are in it, and say whether any is."""
        while len(self._tasks) < limit:
            job = next(waiting, None)
            if job is None:
                break
            try:
                self._submit(job)
            except VLLMValidationError as error:
                self._fail(job, error)
            except RecursionError:
                self._fail(job, VLLMValidationError("the line is nested too deep.", parameter="prompt"))
            else:
                continue
            advance(1, self._counts)
        return bool(self._tasks)

    def _submit(self, job: Job) -> None:
        task = parse_job(job, self._chat)
        fields = {**self._sampling, **task.fields, "output_kind": RequestOutputKind.FINAL_ONLY}
        params = SamplingParams(**fields)
        if params.seed is None:
            params.seed = self._seed(job.index)
        request_id = str(job.index)
        # Whether a grammar fails early or late must not show, so no time at all is given to it here.
        self._engine.add_request(request_id, self._prompt(task), params, priority=task.priority, grammar_seconds=0)
        self._tasks[request_id] = (job, task)

    def _seed(self, index: int) -> int:
        """Return a seed that depends on the prompt's place only, so that a resumed run samples the same."""
        from jaxllm.engine.front_end.input_processor import mix

        return mix(self._engine.model_config.seed, index)

    def _prompt(self, task: Task) -> Any:
        if task.messages is None:
            return task.prompt
        rendered = self._engine.front.chat_renderer.render(task.messages, "messages")
        return dataclasses.replace(rendered, salt=task.prompt.get("cache_salt"))

    def _take(self, output: RequestOutput) -> None:
        job, task = self._tasks.pop(output.request_id)
        self._counts.prompt_tokens += len(output.prompt_token_ids or ())
        self._counts.output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if "max_tokens" not in task.fields:
            self._counts.cut_off += any(completion.finish_reason == "length" for completion in output.outputs)
        record = make_record(job.index, task, output)
        error = next((each.stop_reason for each in output.outputs if each.finish_reason == "error"), None)
        if error is None:
            self._sink.put(job.index, record)
        else:
            self._counts.failed += 1
            asked = None if task.fields.get("structured_outputs") is None else "structured_outputs"
            self._sink.fail(job.index, record | {"error": error, "parameter": asked})

    def _fail(self, job: Job, error: VLLMValidationError) -> None:
        self._counts.failed += 1
        message = str(error).encode("utf-8", "backslashreplace").decode()
        record = {"index": job.index, "error": message, "parameter": error.parameter}
        label = job_label(job)
        self._sink.fail(job.index, record if label is None else {"id": label, **record})


def make_record(index: int, task: Task, output: RequestOutput) -> dict[str, Any]:
    """Return what the output file says of a finished prompt; nothing in it depends on timing."""
    record: dict[str, Any] = {} if task.label is None else {"id": task.label}
    record["index"] = index
    if task.messages is not None:
        record["messages"] = task.messages
    record |= {"prompt": output.prompt, "num_prompt_tokens": len(output.prompt_token_ids or ())}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _positions(output.prompt_logprobs)
    if output.prompt_token_id_logprobs is not None:
        record["prompt_token_id_logprobs"] = output.prompt_token_id_logprobs.tolist()
    record["outputs"] = [
        {
            "index": completion.index,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        | _logprobs(completion)
        for completion in output.outputs
    ]
    return record


def _logprobs(completion: Any) -> dict[str, Any]:
    if completion.logprobs is None:
        return {}
    return {"cumulative_logprob": completion.cumulative_logprob, "logprobs": _positions(completion.logprobs)}


def _positions(positions: Iterable[Mapping[int, Logprob] | None]) -> list[Any]:
    """Return one list of entries per position, and None where nothing is known, as at the prompt's first token."""
    return [
        [{"token_id": token_id, **dataclasses.asdict(entry)} for token_id, entry in position.items()]
        if position
        else None
        for position in positions
    ]


def _sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the command line or the config file gave."""
    flags = given_sampling(args)
    flags |= {name: getattr(args, name) for name in ("stop", "stop_token_ids") if getattr(args, name) is not None}
    if flags.get("max_tokens") == -1:
        flags["max_tokens"] = None
    return flags


def _read_prompts(args: argparse.Namespace) -> list[Job]:
    if bool(args.prompt) == bool(args.input):
        raise VLLMValidationError(
            "give prompts with either --prompt or --input.", parameter="prompt", value=args.prompt
        )
    return jobs_from_prompts(args.prompt) if args.prompt else read_jobs(args.input)


def _check_output(args: argparse.Namespace) -> Path | None:
    if args.output is None:
        if sys.stdout is None:
            message = "standard output is closed: name a file with --output."
            raise VLLMValidationError(message, parameter="output")
        return None
    return output_path(args.output, args.input, (".jsonl", ".json"))


def _report(counts: Counts, num_prompts: int, max_tokens_given: bool) -> int:
    if counts.cut_off and not max_tokens_given:
        say(f"Prompts cut off at max_tokens: {counts.cut_off}; set --max-tokens for more.")
    if counts.failed:
        say(f"{counts.failed} of {num_prompts} prompts failed; their places hold the errors.")
    return 1 if counts.failed else 0

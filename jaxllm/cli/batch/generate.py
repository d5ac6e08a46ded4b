"""`jaxllm generate` runs prompts from flags or a file on one engine, and writes results in input order."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.cli.batch.jobs import Job, Task, jobs_from_prompts, parse_job, read_jobs
from jaxllm.cli.batch.journal import Console, Journal, output_path
from jaxllm.cli.batch.offline_run import Engine, Run, exit_status, load_chat_engine, load_engine, run_jobs
from jaxllm.cli.batch.result_files import write_array, write_lines
from jaxllm.cli.flags.engine_flags import add_engine_flags, read_engine_args, result_settings
from jaxllm.cli.flags.sampling_flags import SAMPLING_FLAGS, add_sampling_flags, given_sampling
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import Logprob
from jaxllm.outputs import RequestOutput
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.utils.argparse_utils import Repeat
from jaxllm.utils.streams import say


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="generate text for prompts or a file of them",
        description="Generate text. A killed run with --output resumes when started again.",
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
    """Generate and return the exit status. Everything is checked before the model loads."""
    engine_args = read_engine_args(args)
    flags = _sampling_flags(args)
    SamplingParams(**flags)
    jobs = _read_prompts(args)
    output = _check_output(args)
    settings = result_settings(engine_args, sorted(flags.items()), args.chat)
    keys = [job.key(settings) for job in jobs]
    write = write_lines if output is None or output.suffix == ".jsonl" else write_array
    sink = Console(len(jobs), sys.stdout) if output is None else Journal(output, keys, write)
    load = load_chat_engine if args.chat else load_engine
    counts = run_jobs(
        jobs,
        sink,
        lambda: (make_engine or load)(engine_args),
        lambda engine: _GenerateRun(engine, sink, len(jobs), flags, args.chat),
    )
    if counts is not None and counts.cut_off and "max_tokens" not in flags:
        say(f"Prompts cut off at max_tokens: {counts.cut_off}; set --max-tokens for more.")
    return exit_status(counts, len(jobs))


class _GenerateRun(Run):
    """Generates for each prompt with the settings of the flags and its line."""

    def __init__(
        self, engine: Engine, sink: Journal | Console, num_prompts: int, flags: Mapping[str, Any], chat: bool
    ) -> None:
        super().__init__(engine, sink, num_prompts)
        self._chat = chat
        self._sampling = {**engine.front.ready.default_sampling_params, **flags}
        self._tasks: dict[int, Task] = {}

    def submit(self, request_id: str, job: Job) -> None:
        """Submit a prompt to the engine. Raises VLLMValidationError."""
        task = parse_job(job, self._chat)
        fields = {**self._sampling, **task.fields, "output_kind": RequestOutputKind.FINAL_ONLY}
        params = SamplingParams(**fields)
        if params.seed is None:
            params.seed = self._seed(job.index)
        # The result must not depend on how early a grammar fails, so it gets no time here.
        self.engine.add_request(request_id, self._prompt(task), params, priority=task.priority, grammar_seconds=0)
        self._tasks[job.index] = task

    def _seed(self, index: int) -> int:
        """Return a seed that depends only on the prompt's index, so that a resumed run samples the same."""
        from jaxllm.engine.front.input_processor import mix

        return mix(self.engine.model_config.seed, index)

    def _prompt(self, task: Task) -> Any:
        if task.messages is None:
            return task.prompt
        rendered = self.engine.front.chat_renderer.render(task.messages, "messages")
        return dataclasses.replace(rendered, salt=task.prompt.get("cache_salt"))

    def take(self, job: Job, output: RequestOutput) -> None:
        """Put a prompt's outputs, or the error of a failed one, into the sink."""
        task = self._tasks.pop(job.index)
        self.counts.prompt_tokens += len(output.prompt_token_ids or ())
        self.counts.output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if "max_tokens" not in task.fields:
            self.counts.cut_off += any(completion.finish_reason == "length" for completion in output.outputs)
        record = make_record(job.index, task, output)
        error = next((str(each.stop_reason) for each in output.outputs if each.finish_reason == "error"), None)
        if error is None:
            self.sink.put(job.index, record)
        else:
            self.counts.failed += 1
            asked = None if task.fields.get("structured_outputs") is None else "structured_outputs"
            self.sink.fail(job.index, record | {"error": error, "parameter": asked})


def make_record(index: int, task: Task, output: RequestOutput) -> dict[str, Any]:
    """Return the output record of a finished prompt; it does not depend on timing."""
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
            "stop_reason": _plain(completion.stop_reason),
        }
        | _logprobs(completion)
        for completion in output.outputs
    ]
    return record


def _plain(reason: int | str | None) -> int | str | None:
    """Return a stop reason that JSON can hold."""
    return str(reason) if isinstance(reason, str) else reason


def _logprobs(completion: Any) -> dict[str, Any]:
    if completion.logprobs is None:
        return {}
    return {"cumulative_logprob": completion.cumulative_logprob, "logprobs": _positions(completion.logprobs)}


def _positions(positions: Iterable[Mapping[int, Logprob] | None]) -> list[Any]:
    """Return one list of entries per position; None for a position without any, such as the prompt's first token."""
    return [
        [{"token_id": token_id, **dataclasses.asdict(entry)} for token_id, entry in position.items()]
        if position
        else None
        for position in positions
    ]


def _sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters set on the command line or in the config file."""
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

"""`jaxllm embed` embeds or classifies each text of a file, and writes results in input order."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.cli.batch.jobs import Job, read_jobs, read_value
from jaxllm.cli.batch.journal import Journal, output_path
from jaxllm.cli.batch.offline_run import Engine, Run, exit_status, load_engine, run_jobs
from jaxllm.cli.batch.result_files import Write, require_pyarrow, write_lines, write_npy, write_parquet
from jaxllm.cli.flags.engine_flags import add_engine_flags, read_engine_args, result_settings
from jaxllm.config.kinds import Integer, Kind
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.params.checks import INT32_MAX, check_int, check_str, shown
from jaxllm.pooling_params import PoolingParams
from jaxllm.resolve.engine_args import EngineArgs

_TASKS = {"embed": "embedding", "classify": "probs"}
"""The tasks, and the names of their vectors in the output."""
_SUFFIXES = (".jsonl", ".npy", ".parquet")
_FORMS = ("text", "prompt", "prompt_token_ids")
"""The possible fields with a line's text; a line has one of them."""
_MORE_OF_PROMPT = ("text_pair", "token_type_ids", "cache_salt")
_OF_THE_RUN = ("dimensions", "use_activation", "truncate_prompt_tokens")
"""Fields that hold for all lines, whose vectors would not be comparable otherwise."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "embed",
        help="embed or classify the texts of a file",
        description="Embed or classify texts. A killed run resumes when started again.",
        epilog="A .jsonl line is a string, or an object with text, prompt or prompt_token_ids; its other fields, such "
        "as id, come back in a .jsonl output beside the embedding. A .npy output is a float32 array [texts, "
        "dimensions]. A text that fails gets its error: in its line, or in a .npy output a row of NaN and a line of "
        "OUTPUT.errors.jsonl; the exit status is then 1. Other statuses: 0 done, 2 misuse, 4 results could not be "
        "written, 130 interrupted.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--input", metavar="FILE", help="texts: .jsonl, or .txt with one per line")
    parser.add_argument("--output", metavar="FILE", help="results: .jsonl, .npy or, with pyarrow, .parquet")
    parser.add_argument(
        "--task", choices=_TASKS, default="embed", help="embed, or classify: probabilities of the model's classes"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="begin texts with this prompt of the model's folder; default: the folder's default prompt, if it has one",
    )
    prompts.add_argument(
        "--prompt-prefix", metavar="TEXT", help="begin texts with this instead; token ids stay as they are"
    )
    _add_integer(parser, "--dimensions", Integer(1, INT32_MAX), "shorten embeddings, where the model allows it")
    parser.add_argument(
        "--normalize",
        "--use-activation",
        dest="use_activation",
        action=argparse.BooleanOptionalAction,
        help="normalize embeddings, or turn scores into probabilities; default: the model's choice",
    )
    longest = Integer(-1, INT32_MAX)
    _add_integer(parser, "--truncate-prompt-tokens", longest, "cut longer texts off; -1: at the model's longest")
    add_engine_flags(parser, "hub id or folder")
    parser.set_defaults(run=run, disable_log_stats=True)
    return parser


def _add_integer(parser: argparse.ArgumentParser, name: str, kind: Kind, help_text: str) -> None:
    parser.add_argument(name, help=help_text, **(kind.flag() or {}))


class _Wish(NamedTuple):
    """The settings from the flags on which results depend."""

    task: str
    dimensions: int | None
    use_activation: bool | None
    prompt_name: str | None
    prompt_prefix: str | None
    truncate_prompt_tokens: int | None

    def params(self) -> PoolingParams:
        """Return the params of each request. Raises VLLMValidationError."""
        return PoolingParams(task=self.task, dimensions=self.dimensions, use_activation=self.use_activation)


def run(args: argparse.Namespace, make_engine: Callable[[EngineArgs], Engine] | None = None) -> int:
    """Embed the texts and return the exit status.

    Arguments and files are checked before the model loads, and what depends on the model after that.
    """
    engine_args = read_engine_args(args)
    if engine_args.runner == "auto":
        engine_args = dataclasses.replace(engine_args, runner="pooling")
    wish = _Wish(*(getattr(args, name) for name in _Wish._fields))
    wish.params()
    for flag in ("input", "output"):
        if getattr(args, flag) is None:
            raise VLLMValidationError(f"say --{flag} FILE.", parameter=flag)
    jobs = read_jobs(args.input)
    output = output_path(args.output, args.input, _SUFFIXES)
    if output.suffix == ".parquet":
        require_pyarrow(args.output)
    settings = result_settings(engine_args, wish)
    sink = Journal(output, [job.key(settings) for job in jobs], _writer(output, wish.task, len(jobs)))
    counts = run_jobs(
        jobs,
        sink,
        lambda: (make_engine or load_engine)(engine_args),
        lambda engine: _EmbedRun(engine, sink, len(jobs), wish, as_lines=output.suffix == ".jsonl"),
    )
    return exit_status(counts, len(jobs))


def _writer(output: Path, task: str, num_rows: int) -> Write:
    if output.suffix == ".npy":
        return partial(write_npy, num_rows=num_rows, errors=output.with_name(output.name + ".errors.jsonl"))
    if output.suffix == ".parquet":
        return partial(write_parquet, vector=_TASKS[task], has_labels=task == "classify")
    return write_lines


class Text(NamedTuple):
    """A parsed line."""

    prompt: dict[str, Any]
    fields: dict[str, Any]
    """The line's own id, which the output repeats."""
    priority: int


def _parse_text(job: Job, prefix: str) -> Text:
    """Parse a job's line and put `prefix` before its text. Raises VLLMValidationError."""
    line = read_value(job)
    line = {"text": line} if isinstance(line, str) else line
    if not isinstance(line, dict):
        message = f'the line must be a JSON string, or an object such as {{"text": "..."}}, got {shown(line)}.'
        raise VLLMValidationError(message, parameter="prompt", value=shown(line))
    forms = [name for name in _FORMS if line.get(name) is not None]
    if len(forms) != 1:
        message = f"a line needs one of {', '.join(_FORMS)}; this one has {' and '.join(forms) or 'none'}."
        raise VLLMValidationError(message, parameter="prompt", value=line)
    for name in _OF_THE_RUN:
        if name in line:
            message = f"{name} is the same for all lines: leave it out, and see `jaxllm embed --help`."
            raise VLLMValidationError(message, parameter=name, value=line[name])
    (form,) = forms
    prompt = {name: line[name] for name in _MORE_OF_PROMPT if line.get(name) is not None}
    if form == "prompt_token_ids":
        prompt[form] = line[form]
    elif line[form] == "":
        prompt["prompt"] = prefix
    else:
        prompt["prompt"] = prefix + check_str(form, line[form], INT32_MAX)
    return Text(prompt, line, check_int("priority", line.get("priority") or 0, -(2**31), 2**31 - 1))


class _EmbedRun(Run):
    """Pools each text with the flags' settings. Raises VLLMValidationError if the model cannot."""

    def __init__(self, engine: Engine, sink: Journal, num_prompts: int, wish: _Wish, *, as_lines: bool) -> None:
        super().__init__(engine, sink, num_prompts)
        from jaxllm.engine.front.pooling_resolver import resolve_pooling_params, verify_pooling_task
        from jaxllm.text.tokenizer import encode_options

        settings = engine.front.ready.pooling
        verify_pooling_task(wish.task, settings, engine.model_config.runner_type)
        self._params = resolve_pooling_params(wish.params(), wish.task, settings)
        self._options = (
            {} if wish.truncate_prompt_tokens is None else {"truncate_prompt_tokens": wish.truncate_prompt_tokens}
        )
        encode_options(self._options, engine.front.ready.max_model_len, outputs=0)
        self._prefix = _prefix(wish, settings)
        self._adapter = settings.adapter(wish.prompt_name, None, "prompt_name") if wish.task == "embed" else None
        self._name = _TASKS[wish.task]
        self._labels = settings.id2label if wish.task == "classify" else {}
        self._as_lines = as_lines
        self._fields: dict[int, dict[str, Any]] = {}

    def submit(self, request_id: str, job: Job) -> None:
        """Submit a text to the engine. Raises VLLMValidationError."""
        text = _parse_text(job, self._prefix)
        self.engine.add_request(
            request_id,
            text.prompt,
            self._params,
            lora_request=self._adapter,
            tokenization_kwargs=self._options,
            priority=text.priority,
        )
        self._fields[job.index] = text.fields

    def take(self, job: Job, output: PoolingRequestOutput[PoolingOutput]) -> None:
        """Put a text's vector, or its error, into the sink."""
        fields = self._fields.pop(job.index)
        self.counts.prompt_tokens += len(output.prompt_token_ids)
        if output.error is not None:
            self.fail(job, output.error, None)
            return
        vector = output.outputs.data
        result: dict[str, Any] = {"index": job.index, "num_prompt_tokens": len(output.prompt_token_ids)}
        if len(vector) > 1 and self._labels:
            best = str(int(vector.argmax()))
            result["label"] = self._labels.get(best, best)
        if self._as_lines:
            record = fields | result | {self._name: vector.tolist()}
        else:
            text = fields.get("text", fields.get("prompt"))
            record = {"id": fields.get("id"), "text": text} | result | {"vector": vector.astype("<f4").tobytes()}
        self.sink.put(job.index, record)


def _prefix(wish: _Wish, settings: Any) -> str:
    """Return the prefix of texts: from the flags, or else the default prompt of the model's embeddings."""
    if wish.prompt_prefix is not None:
        return wish.prompt_prefix
    return settings.prompt(wish.prompt_name) if wish.task == "embed" or wish.prompt_name is not None else ""

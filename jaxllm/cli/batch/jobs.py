"""Parse the lines of an input file into prompts with sampling parameters. A bad line is an error of that line only."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError, unknown_parameter
from jaxllm.params.checks import INT32_MAX, check_int, check_str, shown
from jaxllm.params.sampling_rules import GONE
from jaxllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_OTHER_FIELDS = ("id", "index", "cache_salt", "priority", "sampling_params")
_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if not name.startswith("_") and name not in ("output_text_buffer_length", "output_kind", "skip_clone")
)
_OBJECTS: Mapping[str, type[RepetitionDetectionParams | StructuredOutputsParams]] = {
    "repetition_detection": RepetitionDetectionParams,
    "structured_outputs": StructuredOutputsParams,
}
"""Sampling parameters that are objects in JSON, with their types."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One prompt as it is in the input."""

    index: int
    line: bytes
    is_json: bool

    def key(self, settings: bytes) -> str:
        """Return a digest of all that this prompt's result depends on: index, line, and the run's settings."""
        return hashlib.sha256(b"%d\0%s\0%s" % (self.index, settings, self.line)).hexdigest()[:32]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A parsed prompt: `messages` are not rendered yet; `fields` are keywords of SamplingParams."""

    prompt: Mapping[str, Any]
    messages: list[Any] | None
    fields: Mapping[str, Any]
    label: Any
    """The line's "id", or None; its result repeats it."""
    priority: int


def jobs_from_prompts(prompts: list[str]) -> list[Job]:
    """Make one job per --prompt."""
    return [Job(i, prompt.encode("utf-8", "surrogateescape"), False) for i, prompt in enumerate(prompts)]


def read_jobs(name: str) -> list[Job]:
    """Make one job per line of a .jsonl or .txt file; blank lines are skipped."""
    if Path(name).suffix not in (".jsonl", ".txt"):
        message = f"--input must be a .jsonl or .txt file, got {shown(name)}."
        raise VLLMValidationError(message, parameter="input", value=name)
    return [Job(i, line, Path(name).suffix == ".jsonl") for i, line in enumerate(read_lines(name))]


def read_lines(name: str, flag: str = "input") -> list[bytes]:
    """Return the lines of an input file, at least one; blank ones are skipped. Raises VLLMValidationError."""
    try:
        content = Path(name).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # no such file, no such home, no such name
        reason = error.strerror if isinstance(error, OSError) else error
        raise VLLMValidationError(
            f"--{flag} {shown(name)}: {reason}.", parameter=flag.replace("-", "_"), value=name
        ) from error
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    if not lines:
        raise VLLMValidationError(f"--{flag} {name} has no prompts.", parameter=flag.replace("-", "_"), value=name)
    return lines


def parse_job(job: Job, chat: bool) -> Task:
    """Parse a job's line; `chat` turns a text prompt into a user's message. Raises VLLMValidationError."""
    line = _as_object(read_value(job)) if job.is_json else {"prompt": read_value(job)}
    forms = [name for name in _PROMPT_FIELDS if line.get(name) is not None]
    if len(forms) != 1:
        message = f"a line needs one of {', '.join(_PROMPT_FIELDS)}; this one has {' and '.join(forms) or 'none'}."
        raise VLLMValidationError(message, parameter="prompt", value=line)
    messages: Any = line.get("messages")
    prompt: dict[str, Any] = {}
    if messages is None:
        prompt = {forms[0]: line[forms[0]]}
        if chat and forms[0] == "prompt":
            messages, prompt = [{"role": "user", "content": line["prompt"]}], {}
    elif not isinstance(messages, list) or not messages:
        message = f"messages must be a list with at least one message, got {shown(messages)}."
        raise VLLMValidationError(message, parameter="messages", value=messages)
    if line.get("cache_salt") is not None:
        prompt["cache_salt"] = check_str("cache_salt", line["cache_salt"], INT32_MAX)
    priority = check_int("priority", line.get("priority") or 0, -(2**31), 2**31 - 1)
    return Task(prompt, messages, _sampling_fields(line), line.get("id"), priority)


def job_label(job: Job) -> Any:
    """Return the "id" of a line, for an error record; None if it cannot be read."""
    try:
        return _as_object(read_value(job)).get("id")
    except VLLMValidationError:
        return None


def read_value(job: Job) -> Any:
    """Return the value of a job's line: parsed JSON, or the plain text. Raises VLLMValidationError."""
    try:
        return msgspec.json.decode(job.line) if job.is_json else job.line.decode("utf-8")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the line is not {'JSON' if job.is_json else 'UTF-8'}: {error}."
        raise VLLMValidationError(message, parameter="prompt", value=shown(job.line)) from error


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        message = f'the line must be a JSON object such as {{"prompt": "..."}}, got {shown(value)}.'
        raise VLLMValidationError(message, parameter="prompt", value=shown(value))
    return value


def _sampling_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's sampling parameters, from the top level and from "sampling_params", which takes precedence."""
    nested = line.get("sampling_params") or {}
    if not isinstance(nested, dict):
        message = f"sampling_params must be a JSON object, got {shown(nested)}."
        raise VLLMValidationError(message, parameter="sampling_params", value=nested)
    top = {name: line[name] for name in line if name not in _PROMPT_FIELDS and name not in _OTHER_FIELDS}
    known = (*_PROMPT_FIELDS, *_OTHER_FIELDS, *_SAMPLING_FIELDS)
    for fields, names in ((top, known), (nested, _SAMPLING_FIELDS)):
        for name, value in fields.items():
            if name not in _SAMPLING_FIELDS:
                raise unknown_parameter("the line", name, value, names, GONE)
    fields = top | nested
    for name, kind in _OBJECTS.items():
        option = fields.get(name)
        if isinstance(option, dict):
            fields[name] = _make_object(name, kind, option)
    return fields


def _make_object[T: msgspec.Struct](name: str, kind: type[T], options: Mapping[str, Any]) -> T:
    """Convert a JSON object to a sampling parameter's own type."""
    known = [field.name for field in msgspec.structs.fields(kind)]
    for key, value in options.items():
        if key not in known:
            raise unknown_parameter(name, key, value, known, {})
    return kind(**options)

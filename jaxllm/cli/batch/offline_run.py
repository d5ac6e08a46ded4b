"""Run jobs on one engine, many at a time, and pass each result to a sink. `generate` and `embed` are such runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jaxllm.cli.batch.jobs import Job, job_label
from jaxllm.cli.batch.journal import Console, Journal
from jaxllm.cli.batch.progress import Counts, Progress
from jaxllm.config.environment import default_cache_dir
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import AnyOutput
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.utils.streams import say

QUEUE_LENGTH = 1024
"""The number of prompts queued in the engine; more would only delay the first results."""


class Engine(Protocol):
    """The part of an LLMEngine that a run needs."""

    @property
    def front(self) -> Any: ...

    @property
    def vllm_config(self) -> Any: ...

    @property
    def model_config(self) -> Any: ...

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        grammar_seconds: float = 0.0,
    ) -> Any: ...

    def step(self) -> list[AnyOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def abort_request(self, request_ids: str) -> None: ...

    def align(self, prompt: Any, token_ids: Sequence[int]) -> Any: ...

    def shutdown(self) -> None: ...


def load_engine(engine_args: EngineArgs) -> Engine:
    """Load the model. Raises VLLMValidationError if that fails."""
    from jaxllm.engine.offline.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(engine_args)


def load_chat_engine(engine_args: EngineArgs) -> Engine:
    """Load a model that answers chat messages.

    Raises VLLMValidationError as `load_engine` does, and, before the weights are read, if the model has no chat
    template.
    """
    if engine_args.chat_template is None:
        _check_template(engine_args)
    return load_engine(engine_args)


def _check_template(engine_args: EngineArgs) -> None:
    from jaxllm.engine.core.engine_tokenizer import load_engine_tokenizer
    from jaxllm.loading.open import open_config

    checkpoint = open_config(
        engine_args.model,
        revision=engine_args.revision,
        token=engine_args.hf_token,
        download_dir=engine_args.download_dir,
        sees=False,
    )
    tokenizer = load_engine_tokenizer(engine_args, checkpoint, default_cache_dir())
    if tokenizer is not None and not tokenizer.parts.chat_template:
        message = (
            f"{engine_args.model!r} has no chat template: name one with --chat-template, "
            "or let it go on with texts by `jaxllm generate`."
        )
        raise VLLMValidationError(message, parameter="chat_template")


class Run(ABC):
    """Feeds prompts to the engine and its results to the sink."""

    def __init__(self, engine: Engine, sink: Journal | Console, num_prompts: int) -> None:
        self.engine = engine
        self.sink = sink
        self.counts = Counts()
        self._num_prompts = num_prompts
        self._running: dict[str, Job] = {}

    @abstractmethod
    def submit(self, request_id: str, job: Job) -> None:
        """Submit a job to the engine. Raises VLLMValidationError for an invalid one."""

    @abstractmethod
    def take(self, job: Job, output: AnyOutput) -> None:
        """Put a job's result into the sink."""

    def finish(self, jobs: Sequence[Job]) -> Counts:
        """Run all jobs; at most QUEUE_LENGTH (or twice the engine's batch) are in the engine at a time."""
        limit = max(QUEUE_LENGTH, 2 * self.engine.vllm_config.scheduler_config.max_num_seqs)
        waiting = iter(jobs)
        num_done = self._num_prompts - len(jobs)
        with Progress(self._num_prompts, num_done, shown=self.sink.is_silent) as advance:
            while self._fill(waiting, limit, advance):
                for output in self.engine.step():
                    if output.finished:
                        self.take(self._running.pop(output.request_id), output)
                        advance(1, self.counts)
        return self.counts

    def _fill(self, waiting: Iterator[Job], limit: int, advance: Callable[[int, Counts], None]) -> bool:
        """Submit jobs to the engine until it holds `limit`, and return whether it holds any."""
        while len(self._running) < limit:
            job = next(waiting, None)
            if job is None:
                break
            request_id = str(job.index)
            try:
                self.submit(request_id, job)
            except VLLMValidationError as error:
                self.fail(job, str(error), error.parameter)
            except RecursionError:
                self.fail(job, "the line is nested too deep.", "prompt")
            else:
                self._running[request_id] = job
                continue
            advance(1, self.counts)
        return bool(self._running)

    def fail(self, job: Job, message: str, parameter: str | None) -> None:
        """Put a job's error into the sink."""
        self.counts.failed += 1
        message = message.encode("utf-8", "backslashreplace").decode()
        record = {"index": job.index, "error": message, "parameter": parameter}
        label = job_label(job)
        self.sink.fail(job.index, record if label is None else {"id": label, **record})


def run_jobs(
    jobs: Sequence[Job], sink: Journal | Console, load: Callable[[], Engine], make_run: Callable[[Engine], Run]
) -> Counts | None:
    """Run the jobs without a result in the sink, on an engine loaded if there are any, and finish the sink.

    Returns None if interrupted; the sink then keeps the finished results, if it keeps any.
    """
    counts = Counts()
    with sink:
        todo = [job for job in jobs if job.index not in sink.done]
        if len(todo) < len(jobs):
            say(f"{len(jobs) - len(todo)} of {len(jobs)} prompts are done already.")
        if todo:
            engine = load()
            try:
                counts = make_run(engine).finish(todo)
            except KeyboardInterrupt:
                again = " Start the same command again to go on." if sink.is_silent else ""
                say(f"interrupted: {len(sink.done)} of {len(jobs)} prompts are done.{again}")
                return None
            finally:
                engine.shutdown()
        sink.finish()
    return counts


def exit_status(counts: Counts | None, num_prompts: int) -> int:
    """Return the exit status of a run, and print the number of failed prompts."""
    if counts is None:
        return 130
    if counts.failed:
        say(f"{counts.failed} of {num_prompts} prompts failed; their places hold the errors.")
    return 1 if counts.failed else 0

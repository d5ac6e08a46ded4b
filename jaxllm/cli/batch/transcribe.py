"""`jaxllm transcribe` turns files of speech into text, subtitles or tables, all of them together on one engine."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxllm.cli.batch.offline_run import Engine, load_engine
from jaxllm.cli.flags.engine_flags import add_engine_flags, read_engine_args
from jaxllm.config.kinds import Number
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import ClipInput
from jaxllm.outputs import RequestOutput
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.speech.formats import FORMATS
from jaxllm.speech.tokens import SpeechTokens
from jaxllm.speech.transcription import AlignAsk, SpeechOptions, Transcription
from jaxllm.utils.streams import losing_messages, say, writing

_NUM_READERS = 2
"""The files that are read ahead, each in a thread."""
_MAX_BYTES, _MAX_VALUES = 1 << 36, 1 << 38
"""The samples of a file, which its user has chosen: weeks of sound."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand."""
    parser = commands.add_parser(
        "transcribe",
        help="turn speech into text or subtitles",
        usage="%(prog)s FILE ... --model MODEL [--FLAG VALUE ...]",
        description="Turn files of speech, of any length, into text. For each FILE the output folder gets a file of "
        "its name, with the ending of the format; one that exists is replaced.",
        epilog="Exit statuses: 0 done, 1 some files failed, 2 misuse, 4 results could not be written, 130 interrupted.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="WAV, FLAC, Ogg, MP3, MP4, M4A, MOV, WebM, Matroska")
    parser.add_argument("--output-dir", metavar="FOLDER", default=".", help="where to write; default: here")
    parser.add_argument("--output-format", choices=(*FORMATS, "all"), default="txt", help="default: txt")
    parser.add_argument("--language", metavar="CODE", help="the language, such as en; default: found out for each file")
    parser.add_argument(
        "--task", choices=("transcribe", "translate"), default="transcribe", help="translate writes English"
    )
    parser.add_argument("--prompt", metavar="TEXT", default="", help="text before the speech, for spelling and style")
    temperature = Number(0.0, 2.0).flag() or {}
    parser.add_argument("--temperature", default=0.0, help="0 tries bad text again at higher ones", **temperature)
    parser.add_argument("--word-timestamps", action="store_true", help="times of words too, in JSON")
    add_engine_flags(parser, None)
    parser.set_defaults(run=run, disable_log_stats=True)
    return parser


def run(args: argparse.Namespace, make_engine: Callable[[EngineArgs], Engine] | None = None) -> int:
    """Transcribe all files and return the exit status. Flags are checked before the model loads."""
    if args.word_timestamps and args.output_format not in ("json", "all"):
        message = f"--word-timestamps writes times into JSON, and --output-format is {args.output_format}: use json."
        raise VLLMValidationError(message, parameter="word_timestamps", value=True)
    engine_args = read_engine_args(args)
    paths = list(map(Path, args.files))
    _check_names(paths)
    folder = Path(args.output_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    engine = (make_engine or load_engine)(engine_args)
    try:
        return _Run(engine, args, folder).finish(paths)
    finally:
        engine.shutdown()


def _check_names(paths: Sequence[Path]) -> None:
    """Raise VLLMValidationError for two files whose results would have the same name."""
    by_name: dict[str, Path] = {}
    for path in paths:
        other = by_name.setdefault(path.stem, path)
        if other is not path:
            message = f"the results of {other} and {path} would have the same name: give them one after the other."
            raise VLLMValidationError(message, parameter="files", value=str(path))


@dataclass
class _Job:
    """A file that is transcribed."""

    path: Path
    transcription: Transcription
    running: set[str] = field(default_factory=set)
    """The ids of its requests."""
    shown: float = 0.0
    """The seconds of it that the bar shows as done."""


class _Run:
    """Keeps an engine busy with the clips of files, and writes what they make up."""

    def __init__(self, engine: Engine, args: argparse.Namespace, folder: Path) -> None:
        """Raise VLLMValidationError for a model that does not transcribe, or not so."""
        ready = engine.front.ready
        if not ready.transcribes:
            message = f"{engine.model_config.model!r} does not turn speech into text: name a Whisper."
            raise VLLMValidationError(message, parameter="model", value=engine.model_config.model)
        self._engine, self._folder = engine, folder
        self._formats = tuple(FORMATS) if args.output_format == "all" else (args.output_format,)
        self._tokens = SpeechTokens.of(engine.front.require_tokenizer(), ready.vocab_size)
        self._takes: ClipInput = ready.media.clips
        self._options = SpeechOptions(
            args.language,
            args.task,
            has_timestamps=True,
            has_words=args.word_timestamps,
            prompt=args.prompt,
            temperature=args.temperature,
        )
        self._tokens.check_language(args.language)
        self._tokens.check_task(args.task)
        self._most = 2 * engine.vllm_config.scheduler_config.max_num_seqs
        self._jobs: list[_Job] = []
        self._by_request: dict[str, tuple[_Job, int]] = {}
        self._num_opened = self._num_failed = 0

    def finish(self, paths: Sequence[Path]) -> int:
        """Transcribe files and return the exit status."""
        unread = iter(paths)
        reading: deque[tuple[Path, Future[Any]]] = deque()
        with ThreadPoolExecutor(_NUM_READERS) as readers, _progress() as advance:
            try:
                while True:
                    while len(reading) < _NUM_READERS and (path := next(unread, None)) is not None:
                        reading.append((path, readers.submit(self._read, path)))
                    self._submit(advance)
                    if (
                        len(self._by_request) < self._most
                        and reading
                        and (reading[0][1].done() or not self._by_request)
                    ):
                        self._open(*reading.popleft(), advance)
                    elif self._by_request:
                        for output in self._engine.step():
                            if isinstance(output, RequestOutput) and output.finished:
                                self._take(output, advance)
                    else:
                        break
            except BaseException:
                readers.shutdown(wait=False, cancel_futures=True)
                raise
        if self._num_failed:
            say(f"{self._num_failed} of {len(paths)} files failed.")
        return 1 if self._num_failed else 0

    def _read(self, path: Path) -> Any:
        """Return the sound of a file. Raises OSError and VLLMValidationError."""
        from jaxllm.media.audio.blocks import AudioLimits  # which loads numpy
        from jaxllm.speech.sound import read_sound

        return read_sound(path.read_bytes(), self._takes, AudioLimits(None, _MAX_BYTES, _MAX_VALUES))

    def _open(self, path: Path, reading: Future[Any], advance: Callable[[float, float], None]) -> None:
        """Begin with a file that was read."""
        from jaxllm.engine.front.input_processor import mix

        seed = mix(self._engine.model_config.seed, self._num_opened) >> 1
        self._num_opened += 1
        try:
            options = replace(self._options, sampling={"seed": seed})
            sound = reading.result()
            job = _Job(path, Transcription(sound, self._tokens, options, self._engine.model_config.max_model_len))
        except OSError as error:
            self._report(path, f"{error.strerror or error}.")
        except VLLMValidationError as error:
            self._report(path, str(error))
        else:
            advance(0.0, sound.seconds)
            self._jobs.append(job)

    def _submit(self, advance: Callable[[float, float], None]) -> None:
        """Give the engine requests of the files that have begun, the first ones first."""
        for job in list(self._jobs):
            while len(self._by_request) < self._most and (ask := job.transcription.next_ask()) is not None:
                request_id = f"{id(job)}-{ask.number}"
                try:
                    if isinstance(ask, AlignAsk):
                        job.transcription.take(ask.number, self._engine.align(ask.prompt, ask.token_ids))
                        self._advance(job, advance)
                        continue
                    self._engine.add_request(request_id, ask.prompt, ask.params)
                except VLLMValidationError as error:
                    self._fail(job, str(error))
                    break
                job.running.add(request_id)
                self._by_request[request_id] = job, ask.number

    def _take(self, output: RequestOutput, advance: Callable[[float, float], None]) -> None:
        job, number = self._by_request.pop(output.request_id)
        job.running.discard(output.request_id)
        [completion] = output.outputs
        if completion.finish_reason in ("error", "abort"):
            self._fail(job, f"{completion.stop_reason or 'the request was aborted'}.")
            return
        job.transcription.take(number, output)
        self._advance(job, advance)

    def _advance(self, job: _Job, advance: Callable[[float, float], None]) -> None:
        """Show what is done of a file, and write its transcript once that is all of it."""
        done = job.transcription.seconds_done
        advance(done - job.shown, 0.0)
        job.shown = done
        if job.transcription.is_done:
            self._jobs.remove(job)
            self._write(job)

    def _write(self, job: _Job) -> None:
        """Write the files of a transcript. Raises OutputError."""
        transcript = job.transcription.transcript()
        for name in self._formats:
            path = self._folder / f"{job.path.stem}.{name}"
            with writing(path):
                path.write_text(FORMATS[name](transcript), encoding="utf-8")

    def _fail(self, job: _Job, reason: str) -> None:
        """Give a file up."""
        for request_id in job.running:
            self._engine.abort_request(request_id)
            del self._by_request[request_id]
        self._jobs.remove(job)
        self._report(job.path, reason)

    def _report(self, path: Path, reason: str) -> None:
        self._num_failed += 1
        say(f"jaxllm: {path}: {reason}")


@contextmanager
def _progress() -> Iterator[Callable[[float, float], None]]:
    """Show a bar on standard error; the function takes the seconds of sound that are done, and those that are known."""
    from tqdm import tqdm

    bar = tqdm(
        total=0,
        desc="Speech",
        unit=" s",
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        file=sys.stderr,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s [{elapsed}<{remaining}, {rate_noinv_fmt}]",
        delay=1e-9,  # draws nothing when it is created
    )

    def advance(done: float, known: float) -> None:
        bar.total += known
        with losing_messages():
            bar.update(min(done, bar.total - bar.n))  # the sum of rounded parts may exceed the total

    try:
        yield advance
    finally:
        with losing_messages():
            bar.close()

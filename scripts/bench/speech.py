"""Measure transcription with Whisper base: files at once and one clip alone, perhaps beside HF and whisper.cpp.

    scripts/bench.py speech                             # writes benchmarks/results/speech_speed.json
    scripts/bench.py speech --hf-python DIR/hf/bin/python --whispercpp-python DIR/whispercpp/bin/python

`scripts/peers.sh DIR hf whispercpp` makes the environments; espeak-ng speaks the files. All have the same weights and
decode greedily without timestamps. Contestants are measured in turns, each in a process of its own:

files     20 files of 10 to 60 s, given in one call. HF's pipeline cuts them into clips of 30 s, in the fastest size of
          its batches; whisper.cpp takes one after the other
clip      one clip of 30 s

jaxllm transcribes everything once before it is measured, which compiles its programs; the others the first sound. HF's
sizes of batches are tried on the first files. Figures are medians of rounds, in seconds of sound by seconds. Texts are
compared by the words that differ from jaxllm's in float32.
"""

from __future__ import annotations

import argparse
import difflib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fetch_models import MODELS, FetchError, default_dir, fetch
from lib.results import describe_server, make_parser, result_file, save
from lib.sheet import print_sheet
from lib.speech import Sound, SpeechError, spoken, spoken_files
from peers.contestants import KV_BYTES, Contestant, in_int8
from peers.ggml_whisper import FLOAT16, Q8_0, write_ggml
from peers.turns import say
from peers.worker import BenchmarkError, Worker

NUM_FILES, SECONDS, CLIP_SECONDS = 20, (10.0, 60.0), 30.0
BATCH_SIZES = (4, 8, 16)
"""What HF's pipeline is tried with."""
NUM_TRIED = 8
OURS, HF = "jaxllm_float32", "hf_float32"


def main() -> int:
    """Measure, print and save; return the exit status."""
    parser = make_parser(__doc__)
    for peer in ("hf", "whispercpp"):
        parser.add_argument(f"--{peer}-python", metavar="PATH", help=f"Python of scripts/peers.sh DIR {peer}")
    parser.add_argument("--model", type=Path, help="a Whisper's folder (default: base, fetched)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="shows that all runs, measures nothing and saves nothing")
    args = parser.parse_args()
    try:
        model = args.model or fetch(MODELS["whisper"], default_dir())
        with tempfile.TemporaryDirectory(prefix="bench-speech-") as scratch:
            figures = measure(args, model, Path(scratch))
    except (BenchmarkError, FetchError, OSError, SpeechError) as error:
        print(f"bench speech: {error}", file=sys.stderr)
        return 1
    print_sheet([{"contestant": name, **row} for name, row in figures.items()])
    save(result_file(args, "speech_speed.json"), describe_server() | {"model": model.name, "figures": figures})
    return 0


def measure(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of each contestant by its name."""
    num_files, seconds = (2, (2.0, 3.0)) if args.quick else (NUM_FILES, SECONDS)
    files = spoken_files(folder, num_files, seconds)
    clip = spoken(folder / "clip.npy", min(CLIP_SECONDS, seconds[1]))
    runners = _contestants(args, model, folder)
    rounds: dict[str, list[dict[str, float]]] = {runner.name: [] for runner in runners}
    texts: dict[str, list[str]] = {}
    batch_size: int | None = None
    for turn in range(1 if args.quick else args.rounds):
        for runner in runners[:: 1 if turn % 2 == 0 else -1]:
            with runner.start(folder / runner.name) as worker:
                is_batched = runner.program == "speech_hf"
                if is_batched and batch_size is None:
                    batch_size = BATCH_SIZES[0] if args.quick else _fastest(worker, files)
                options = [batch_size] if is_batched else []
                texts[runner.name], sample = _sample(
                    worker, files, clip, options, compiles=runner.program == "speech_jaxllm"
                )
            rounds[runner.name].append(sample)
            say(f"round {turn + 1}, {runner.label}: {sample}")
    ours = texts[OURS]
    return {
        name: {key: round(statistics.median(each[key] for each in samples), 2) for key in samples[0]}
        | {"words_differ": _words_that_differ(ours, texts[name])}
        | ({"batch": batch_size} if name == HF else {})
        for name, samples in rounds.items()
    }


def _contestants(args: argparse.Namespace, model: Path, folder: Path) -> list[Contestant]:
    settings: dict[str, Any] = {"model": str(model)}
    engine = {"dtype": "float32", "engine": {"kv_cache_memory_bytes": KV_BYTES, "max_num_seqs": 32}}
    ours = Contestant(OURS, "jaxllm, float32", "speech_jaxllm", sys.executable, settings | engine)
    runners = [ours, in_int8(ours)]
    if args.hf_python:
        options = settings | {"dtype": "float32"}
        runners.append(Contestant(HF, "HF, float32", "speech_hf", args.hf_python, options))
    if args.whispercpp_python:
        for name, kind in (("float16", FLOAT16), ("q8_0", Q8_0)):
            file = folder / f"{name}.bin"
            write_ggml(model, file, kind)
            options = {"model": str(file)}
            runner = Contestant(
                f"whispercpp_{name}", f"whisper.cpp, {name}", "speech_whispercpp", args.whispercpp_python, options
            )
            runners.append(runner)
    return runners


def _fastest(worker: Worker, files: Sequence[Sound]) -> int:
    """Return the size of batches that is the fastest."""
    paths = [str(file.file) for file in files]
    worker.call("texts", paths[:1], "en", BATCH_SIZES[0])
    seconds = {size: worker.call("texts", paths[:NUM_TRIED], "en", size).seconds for size in BATCH_SIZES}
    return min(seconds, key=seconds.__getitem__)


def _sample(
    worker: Worker, files: Sequence[Sound], clip: Sound, options: Sequence[Any], *, compiles: bool
) -> tuple[list[str], dict[str, float]]:
    """Return the files' texts, and how many seconds of sound a second takes."""
    sample: dict[str, float] = {}
    texts: list[str] = []
    for name, sounds in (("clip", [clip]), ("files", files)):
        paths = [str(sound.file) for sound in sounds]
        worker.call("texts", paths if compiles else paths[:1], "en", *options)
        answer = worker.call("texts", paths, "en", *options)
        sample[name] = sum(sound.seconds for sound in sounds) / answer.seconds
        texts = answer.value
    return texts, sample


def _words_that_differ(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the share of words that are not the same."""
    shares = []
    for our, their in zip(ours, theirs, strict=True):
        shares.append(1 - difflib.SequenceMatcher(None, our.split(), their.split(), autojunk=False).ratio())
    return round(statistics.mean(shares), 4)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compare jaxllm with what people would use instead, in one run on one machine; outputs first, then speed.

    scripts/benchmark.sh --readme        # makes the environments of the others, and runs this with all of them

Every contestant runs in its own environment and process, with its library's defaults except for the size of the KV
cache (1 GiB). It reads the same bfloat16 checkpoint, gets the same token ids and returns token ids, greedily, ignoring
the end of sequence. HF runs `generate` on batches of 16 in the order of the requests, and its
continuous batching. llama.cpp reads the quantized GGUF file, which is fewer bytes of other weights, one request at a
time: its figures stand beside the others' to show what is possible, not to be compared. So do jaxllm's with weights
that it rounds to int8.

Only one contestant's process exists at a time, because two would share cores, caches and memory bandwidth. In a round
each contestant starts, is measured, and ends; another one is first each time. Starting anew costs a few minutes per
round (vLLM), and shows the start-up that users see and each contestant's own peak of memory. Figures are medians of
the rounds, so a disturbance hits one figure in one round.

Measured, per round:
  offline       64 requests of 16-256 prompt and 16-128 output tokens, given in one call: tokens/s of the whole call
  one stream    32 prompt tokens, 128 output tokens: output tokens by the seconds of the whole call
  first token   128 prompt tokens, 1 output token, in milliseconds of the whole call
  start         from the start of the process to the end of a call for 1 token, files in the page cache: with empty
                compile caches (measured once, before the rounds), and with the caches that this left
  memory        peak resident memory of the process and its children at the end of the round

First, outputs: 16 of the offline requests in every contestant, and again in each round, against jaxllm in float32:
each must follow the reference for 32 tokens, or leave it at a near tie (scripts/peers/agreement.py); otherwise
the run stops. In each round, beside jaxllm, the hardware is measured: the model's matmuls alone, memory read and
copied, medians like the other figures. They give a reference speed: the speed of a program that does nothing else.

--task embed compares embeddings instead, in float32 and bfloat16, of a model that is given as a folder of
sentence-transformers: 512 texts of 4 to 500 tokens, a log-normal mix of random words, given in one call; one text
alone; start and memory as above. sentence-transformers gets its best size of a batch (8 to 128), found anew in each
run. First, cosines: with sentence-transformers in float32, or with jaxllm where that is not given.

--task gguf compares with llama.cpp alone, on quantized GGUF files, jaxllm as it is and rounding as llama.cpp
does, with linear_backend="cpu_int8" and kv_cache_dtype="float16": one stream (32 prompt, 128 output tokens), a prompt
of 512 tokens, 16 streams at once (one batch in llama.cpp too), perplexity on Python's documentation in pieces of 512
tokens, start and memory. JAXLLM_CPU=avx2 holds jaxllm to AVX2; llama.cpp is held to it by its build.

--task pictures asks about pictures of 448 x 448 pixels, in float32 and bfloat16, jaxllm, HF and vLLM in turns, with
random weights in the shapes of SmolVLM-256M (the picture in one tile) and of Qwen3-VL-2B with two layers in the tower
and two in the text model, which HF's Python makes once. Warm, one token per request: one new picture, a second question
about it, eight requests at once, one request with eight pictures, and the tower alone. First, answers: the prompts'
token ids must be equal, and log-probabilities near those of jaxllm in float32. --model names one of the two, smolvlm or
qwen3_vl.

--sweep measures instead how jaxllm's cost grows, --workloads the gain from prefix caching, --speculation the gain from
drafts (beside HF's prompt lookup, if --hf-python is given), --beside-xla the gain from a CPU's own kernels in a whole
engine (with the weights widened as for the comparison, if --hf-python is given, else packed as in the file),
--beside-revision COMMIT what changed since a commit of this repository. --render draws and writes again from the JSON
of the last run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fetch_models import MODELS, FetchError, default_dir, fetch
from lib.machine import describe_machine
from peers import seeing
from peers.beside import beside_revision, beside_xla
from peers.caching import caching
from peers.charts import draw_comparison, draw_sweep, draw_workloads, require_matplotlib
from peers.checkpoint import checkpoint
from peers.compare import compare
from peers.contestants import in_int8, jaxllm, lookups, peers
from peers.embedding import DTYPES, with_whole_length
from peers.embedding import compare as compare_embeddings
from peers.embedding import contestants as embedders
from peers.embedding import summary as embedding_summary
from peers.quantized import compare as compare_gguf
from peers.quantized import summary as gguf_summary
from peers.report import as_text, summary, write_readme
from peers.speculation import speculation
from peers.sweep import sweep
from peers.worker import BenchmarkError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks" / "results"
PEERS = ("hf", "vllm", "llamacpp")
OF_TASK: dict[str, tuple[str, ...]] = {
    "generate": PEERS,
    "embed": ("hf", "vllm"),
    "gguf": ("llamacpp",),
    "pictures": ("hf", "vllm"),
}
"""The peers that can do each task."""
INSTEAD = ("sweep", "workloads", "speculation", "beside_xla", "beside_revision")
"""Measurements of jaxllm alone that replace the comparison."""
SETTING = "JAXLLM_CPU"
"""The environment variable that holds jaxllm to a lesser instruction set."""
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_MODELS = {"gguf": f"{DEFAULT_MODEL} and Gemma 3 270M", "pictures": " and ".join(seeing.SHAPES.values())}
"""The models that are measured by default, where they are others."""
DEFAULT_DTYPES: dict[str, tuple[str, ...]] = {
    "generate": ("bfloat16",),
    "embed": DTYPES,
    "gguf": ("auto",),
    "pictures": DTYPES,
}
"""The default dtypes of each task. For a GGUF file it is the dtype that the processor is fast at."""
DRAW: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "comparison": draw_comparison,
    "sweep": draw_sweep,
    "workloads": draw_workloads,
}
SUMMARIES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "comparison": summary,
    "embed": embedding_summary,
    "gguf": gguf_summary,
    "pictures": seeing.summary,
}


def main() -> int:
    """Measure, print, save, draw; returns the exit status: 1 if there is nothing to compare."""
    parser = make_parser()
    args = parser.parse_args()
    mode = mode_of(args)
    check(parser, args, mode)
    out = args.out or (ROOT / ".cache" / "benchmark" if args.quick else RESULTS)
    of_model = [args.model.stem] if mode == "speculation" and args.model else []
    saved = out / f"{'_'.join((mode, *of_model, *dtypes(args)))}.json"
    draws = mode in DRAW and not args.quick
    try:
        if draws:
            require_matplotlib()
        if args.render:
            report = json.loads(saved.read_text())
        else:
            facts = describe(args)
            out.mkdir(parents=True, exist_ok=True)

            def keep(figures: dict[str, Any]) -> dict[str, Any]:
                saved.write_text(json.dumps(facts | figures, indent=1) + "\n")
                return facts | figures

            report = keep(measure(args, mode, keep))
        print(in_words(report, mode))
        if args.quick:
            print("\n--quick: tiny tasks, which show that everything runs; these are no measurements.")
        if draws:
            DRAW[mode](report, saved.with_suffix(".png"))
        if args.readme:
            write_readme(PAGE, report, f"../{saved.with_suffix('.png').relative_to(ROOT)}")
    except (BenchmarkError, FetchError, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}-python", metavar="PATH", help=f"Python of scripts/peers.sh DIR {peer}")
    parser.add_argument("--task", choices=tuple(OF_TASK), default="generate", help="default: %(default)s")
    parser.add_argument("--model", type=Path, help=".gguf, folder or name (default: SmolLM2-135M, fetched)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16; embed: both; gguf: auto")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny tasks: shows that all runs, measures nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for JSON and charts (default: benchmarks/results)")
    parser.add_argument("--readme", action="store_true", help="write the table into docs/performance.md")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--sweep", action="store_true", help="how jaxllm's cost grows")
    instead.add_argument("--workloads", action="store_true", help="with and without prefix caching")
    instead.add_argument("--speculation", action="store_true", help="with and without drafts")
    instead.add_argument("--beside-xla", action="store_true", help="with a CPU's own kernels and in plain XLA")
    instead.add_argument("--beside-revision", metavar="COMMIT", help="beside another revision of jaxllm")
    parser.add_argument("--draft-model", type=Path, help="with --speculation: a model that guesses, too")
    parser.add_argument("--render", action="store_true", help="measure nothing: from the saved JSON")
    return parser


def mode_of(args: argparse.Namespace) -> str:
    """Return what is measured."""
    if args.task != "generate":
        return args.task
    return next((mode for mode in INSTEAD if getattr(args, mode)), "comparison")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, mode: str) -> None:
    """End with an error if arguments do not go together."""
    if args.readme and (args.quick or args.out or mode != "comparison"):
        parser.error("--readme is for the whole comparison, kept where docs/performance.md finds it")
    able = OF_TASK[args.task]
    if set(given(args)) - set(able) or (args.task != "generate" and any(getattr(args, name) for name in INSTEAD)):
        options = " and ".join(f"--{peer}-python" for peer in able)
        parser.error(f"--task {args.task} goes with {options}, and not with {', '.join(map(option, INSTEAD))}")
    if args.draft_model and mode != "speculation":
        parser.error("--draft-model goes with --speculation")
    if args.llamacpp_python and args.model and args.model.is_dir():
        parser.error("--llamacpp-python needs a --model that llama.cpp reads: a .gguf file")
    if mode == "pictures" and args.model and args.model.name not in seeing.SHAPES:
        parser.error(f"--task pictures has the models {' and '.join(seeing.SHAPES)}, not {args.model.name}")
    if mode == "embed" and not args.render and not (args.model and (args.model / "tokenizer.json").is_file()):
        parser.error("--task embed needs --model FOLDER, which has a tokenizer.json")


def dtypes(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the dtypes that are measured."""
    return (args.dtype,) if args.dtype else DEFAULT_DTYPES[args.task]


def measure(args: argparse.Namespace, mode: str, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the figures of a run; a long run saves them as they come."""
    if os.getloadavg()[0] > 0.3 * (os.cpu_count() or 1):
        print("this machine is busy: the figures will be those of a busy machine", file=sys.stderr)
    if mode == "embed":
        return measure_embeddings(args)
    if mode == "gguf":
        return measure_gguf(args)
    if mode == "pictures":
        return measure_pictures(args)
    (dtype,) = dtypes(args)
    gguf = args.model or fetch(MODELS["smollm2"], default_dir())
    model = checkpoint(gguf, args.hf_python) if mode in ("comparison", "beside_xla") else gguf
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        scratch = Path(folder)
        options: dict[str, Any] = {"rounds": args.rounds, "quick": args.quick, "scratch": scratch}
        if mode == "sweep":
            rows = sweep(model, dtype, quick=args.quick, scratch=scratch, keep=lambda rows: keep({"sweep": rows}))
            return {mode: rows}
        if mode == "workloads":
            return {mode: caching(model, dtype, **options)}
        if mode == "beside_xla":
            figures = beside_xla(model, dtype, **options)
            return {"weights": "widened" if model.is_dir() else "as the file has them", mode: figures}
        if mode == "beside_revision":
            return {mode: beside_revision(model, dtype, args.beside_revision, **options)}
        if mode == "speculation":
            pythons = {peer: getattr(args, f"{peer}_python") for peer in PEERS}
            # Peers that read safetensors need a folder.
            folder = checkpoint(gguf, args.hf_python) if args.hf_python or args.vllm_python else gguf
            options |= {"draft_model": args.draft_model, "others": lookups(folder, gguf, dtype, **pythons)}
            return {mode: speculation(model, dtype, **options, keep=lambda rows: keep({mode: rows}))}
        others = peers(model, gguf, dtype, vllm=args.vllm_python, hf=args.hf_python, llamacpp=args.llamacpp_python)
        ours = jaxllm(model, dtype)
        contestants = [ours, in_int8(ours), *others]
        return compare(contestants, model, dtype, **options)


def measure_embeddings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run of --task embed."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        scratch = Path(folder)
        model = with_whole_length(args.model, scratch)
        contestants = embedders(model, dtypes(args), vllm=args.vllm_python, hf=args.hf_python)
        return compare_embeddings(contestants, model, rounds=args.rounds, quick=args.quick, scratch=scratch)


def measure_gguf(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run of --task gguf: of the file of --model, or of both default files."""
    files = [args.model] if args.model else [fetch(MODELS[name], default_dir()) for name in ("smollm2", "gemma")]
    (dtype,) = dtypes(args)
    figures = {}
    for file in files:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            options = {"rounds": args.rounds, "quick": args.quick, "scratch": Path(folder)}
            figures[file.name] = compare_gguf(file, dtype, args.llamacpp_python, **options)
    return {"files": figures}


def measure_pictures(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run of --task pictures: of the shape of --model, or of both."""
    figures = {}
    for shape in [args.model.name] if args.model else seeing.SHAPES:
        model = seeing.checkpoint(shape, args.hf_python)
        contestants = seeing.contestants(model, dtypes(args), vllm=args.vllm_python, hf=args.hf_python)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            options: dict[str, Any] = {"rounds": args.rounds, "quick": args.quick, "scratch": Path(folder)}
            figures[shape] = seeing.compare(shape, contestants, **options)
    return {"models": figures}


def option(name: str) -> str:
    """Return the command line's spelling of an argument."""
    return f"--{name.replace('_', '-')}"


def given(args: argparse.Namespace) -> list[str]:
    """Return the peers whose Python is given."""
    return [peer for peer in PEERS if getattr(args, f"{peer}_python")]


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Return the facts that the figures depend on, without paths of this machine."""
    peers = given(args)
    has_all = len(peers) == len(OF_TASK[args.task])
    words = (
        ["scripts/benchmark.sh"] if has_all else ["scripts/benchmark.py", *(f"--{peer}-python PATH" for peer in peers)]
    )
    words = [f"{SETTING}={os.environ[SETTING]}", *words] if os.environ.get(SETTING) else words
    words += [option(name) for name in ("quick", *INSTEAD, "readme") if getattr(args, name)]
    words += [args.beside_revision] * bool(args.beside_revision)
    if args.task != "generate":
        words += [f"--task {args.task}", *["--model FOLDER"] * (args.task == "embed")]
        words += [f"--model {args.model.name}"] if args.task == "pictures" and args.model else []
    if args.dtype or args.task == "generate":
        words += [f"--dtype {dtypes(args)[0]}"]
    words += [f"--draft-model {args.draft_model.name}"] if args.draft_model else []
    words += [f"--rounds {args.rounds}"]
    return {
        "date": dt.date.today().isoformat(),
        "command": " ".join(words),
        "machine": describe_machine(),
        "settings": {
            "model": args.model.name if args.model else DEFAULT_MODELS.get(args.task, DEFAULT_MODEL),
            "dtype": " and ".join(dtypes(args)),
            "rounds": args.rounds,
            "quick": args.quick,
        },
    }


def in_words(report: Mapping[str, Any], mode: str) -> str:
    """Return the text to print."""
    if mode in SUMMARIES:
        return SUMMARIES[mode](report)
    if mode == "speculation":
        return "\n".join(f"{name}: {row}" for name, row in report[mode].items())
    tables = report[mode] if mode == "sweep" else {mode: [{"": name} | row for name, row in report[mode].items()]}
    return "\n\n".join(
        as_text([list(rows[0]), *([f"{cell}" for cell in row.values()] for row in rows)]) for rows in tables.values()
    )


if __name__ == "__main__":
    sys.exit(main())

"""Measure hybrids of gated delta rules and attention, and sparse attention, with random weights.

  caching   the gain from prefix caching, measured as scripts/benchmark.py --workloads does: on a prefix hit, layers of
            attention reuse blocks and layers with recurrent state reuse a snapshot; outputs are equal to the bit
  hf        beside HF's generate in turns, as scripts/benchmark.py compares: outputs first, then speed
  speculation  the gain from drafts by `ngram`, in turns, of Qwen3.5-0.8B's shape: one stream of a text that repeats
            itself, one of a code edit. A token is a word or a mark; a logits processor makes the model say the text

`caching` runs a small hybrid like Qwen3.5; `hf` runs it, Qwen3.5-0.8B's shape with its vocabulary, and small models
like DeepSeek V3.2 (sparse) and Kimi Linear (delta).
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from lib.machine import describe_sources
from lib.results import make_parser, save
from lib.shapes import MODELS, SMALL_DELTA, SMALL_HYBRID, SMALL_SPARSE
from peers.caching import caching
from peers.compare import Run, prepare
from peers.contestants import jaxllm, peers
from peers.speculation import CODE, SENTENCE
from peers.turns import take_turns
from peers.worker import PROGRAMS

from jaxllm import LLM, SamplingParams

SHAPES = {
    "small": SMALL_HYBRID,
    "qwen3.5-0.8b": MODELS["qwen3.5-0.8b"],
    "sparse": SMALL_SPARSE,
    "delta": SMALL_DELTA,
}
NO_TOKENIZER: dict[str, Any] = {"skip_tokenizer_init": True}


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=("caching", "hf", "speculation"))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="of hf; default: all")
    parser.add_argument("--hf-python", metavar="PATH", help="Python of scripts/peers.sh DIR hf")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="generated offline by hf; default: 64")
    parser.add_argument("--context", type=int, metavar="N", help="longest prompt of hf, in tokens; default: 256")
    parser.add_argument("--quick", action="store_true", help="tiny tasks: shows that all runs, measures nothing")
    args = parser.parse_args()
    if args.part == "hf" and not args.hf_python:
        parser.error("hf needs --hf-python")
    report = describe_sources() | {"part": args.part, "dtype": args.dtype, "rounds": args.rounds}
    sizes = {"requests": args.requests, "context": args.context}
    options: dict[str, Any] = {"rounds": args.rounds, "quick": args.quick}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        if args.part == "caching":
            model = write_config("small", Path(folder))
            engine: dict[str, Any] = NO_TOKENIZER | {"load_format": "dummy"}
            report["workloads"] = caching(model, args.dtype, scratch=Path(folder), **options, **engine)
        if args.part == "speculation":
            model = write_config("small" if args.quick else "qwen3.5-0.8b", Path(folder))
            report["texts"] = speculation(model, args.dtype, **options)
        for name in (args.shapes or SHAPES) if args.part == "hf" else ():
            scratch = Path(folder, name)
            scratch.mkdir()
            report[name] = beside_hf(name, args.dtype, args.hf_python, scratch, sizes, **options)
    print(json.dumps(report, indent=1))
    save(args.json, report)


def write_config(name: str, folder: Path) -> Path:
    """Write the config.json of a shape into a folder, and return the folder."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


WORDS = re.compile(r"\w+|\W")
EDITED = CODE.replace("values", "numbers")
SAID = {"a text that repeats itself": (SENTENCE * 4, SENTENCE * 30), "a code edit": (CODE, EDITED)}
"""What a prompt is, and what follows it."""
VOCABULARY = {word: number for number, word in enumerate(sorted(set(WORDS.findall(CODE + EDITED + SENTENCE))), 100)}
TOKENS = {name: tuple([VOCABULARY[word] for word in WORDS.findall(said)]) for name, (_, said) in SAID.items()}
LENGTH = min(200, *map(len, TOKENS.values()))


def say(logits_sv: Any, state: Any) -> Any:
    """Make a text's next token the most likely one."""
    texts_nt = jnp.array([tokens[:LENGTH] for tokens in TOKENS.values()], jnp.int32)
    said_s = texts_nt[state.extra_args["text"], jnp.minimum(state.num_outputs_s, LENGTH - 1)]
    return logits_sv.at[jnp.arange(len(logits_sv)), said_s].add(1e4)


say.extra_args = {"text": 0}  # pyright: ignore[reportFunctionMemberAccess]


def speculation(model: Path, dtype: str, *, rounds: int, quick: bool) -> dict[str, Any]:
    """Return each text's tokens/s without drafts and with, in turns, and the median of the ratios."""
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 1024, "max_num_seqs": 4, "logits_processors": [say]}
    settings |= NO_TOKENIZER | {"load_format": "dummy", "enable_prefix_caching": False}
    configs: dict[str, Any] = {"none": None, "ngram": {"method": "ngram"}}
    engines = {name: LLM(str(model), speculative_config=config, **settings) for name, config in configs.items()}
    figures: dict[str, Any] = {}
    for number, (name, (prompt, _)) in enumerate(SAID.items()):
        ids: Any = {"prompt_token_ids": [VOCABULARY[word] for word in WORDS.findall(prompt)]}
        length = 20 if quick else LENGTH
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, extra_args={"text": number})
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(rounds + 1):  # the first one warms up
            for engine_name, engine in engines.items():
                start = time.perf_counter()
                [output] = engine.generate([ids], params, use_tqdm=False)
                assert tuple(output.outputs[0].token_ids) == TOKENS[name][:length], "another text was said"
                if turn:
                    seconds[engine_name].append(time.perf_counter() - start)
        ratios = [without / with_drafts for without, with_drafts in zip(*seconds.values(), strict=True)]
        rates = {f"{engine}_tokens_s": round(length / statistics.median(of), 1) for engine, of in seconds.items()}
        figures[name] = rates | {"times": round(statistics.median(ratios), 2)}
        print(name, figures[name], file=sys.stderr, flush=True)
    for engine in engines.values():
        engine.shutdown()
    return figures


def beside_hf(
    name: str, dtype: str, python: str, scratch: Path, sizes: dict[str, Any], *, rounds: int, quick: bool
) -> dict[str, Any]:
    """Return the figures of jaxllm and of HF's generate with a checkpoint that HF makes."""
    model = scratch / "model"
    command = [python, str(PROGRAMS / "save_random.py"), str(write_config(name, scratch) / "config.json"), str(model)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    _, tasks, reference = prepare(model, quick=quick, scratch=scratch, sizes=sizes, **NO_TOKENIZER)
    others = peers(model, model, dtype, vllm=None, hf=python, llamacpp=None)
    contestants = [jaxllm(model, dtype, **NO_TOKENIZER), next(each for each in others if each.name == "hf_static")]
    runs = [Run(each, tasks, reference, dtype, scratch / each.name) for each in contestants]
    figures = take_turns(runs, lambda run, _: run.warm(), rounds=rounds, compared="outputs")
    return {"tasks": tasks.describe(), "contestants": figures}


if __name__ == "__main__":
    main()

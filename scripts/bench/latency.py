"""Measure how long streams wait for their tokens beside others' prompts, with SmolLM2, perhaps beside vLLM's server.

    scripts/bench.py latency                                   # writes benchmarks/results/latency.json
    scripts/bench.py latency --vllm-python DIR/vllm/bin/python --hf-python DIR/hf/bin/python
    scripts/bench.py latency --unlimited                       # beside jaxllm without its limit for prompts

Servers run at the same time and are measured in turns, by one client. `scripts/peers.sh DIR hf vllm` makes the
environments. The parts:

idle      requests one after the other, with prompts of 30 tokens: the time to the first token
streams   1, 16 and 64 streams that begin at once, with prompts of 128 tokens
long      32 streams alone, and 32 streams to which a prompt of 8,000 tokens comes after some seconds, and a short one
          while it is read: the times between the streams' tokens alone, and while the long prompt is read

Figures are medians of rounds, and ratios those of the same round. Other load on the machine distorts them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from fetch_models import FetchError
from lib.front_end import complete, serve_command
from lib.results import describe_server, find_model, make_server_parser, result_file, save_part
from lib.servers import ServerError, ServerProcess, Streamed, server_process, stream
from peers.checkpoint import checkpoint
from peers.contestants import KV_BYTES
from peers.prompts import Source
from peers.turns import say
from peers.worker import BenchmarkError, environment

SMOLLM2_VOCAB = 49152
START_SECONDS = 900.0
NUM_IDLE, IDLE_PROMPT = 10, 30
STREAMS, PROMPT, ANSWER = (1, 16, 64), 128, 64
NUM_BESIDE, LONG_PROMPT, BESIDE_ANSWER = 32, 8000, 400
LEAD_SECONDS = 8.0
"""The seconds after which the long prompt comes; the short one comes after a quarter of that."""


def main() -> int:
    """Measure, print and save; return the exit status."""
    parser = make_server_parser(__doc__)
    for peer in ("vllm", "hf"):
        parser.add_argument(f"--{peer}-python", metavar="PATH", help=f"Python of scripts/peers.sh DIR {peer}")
    parser.add_argument("--unlimited", action="store_true", help="also measure jaxllm with --itl-target-ms 0")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--caches", type=Path, metavar="DIR", help="keep the servers' caches there")
    args = parser.parse_args()
    try:
        model = checkpoint(find_model(args), args.hf_python)
        if args.vllm_python and not model.is_dir():
            raise BenchmarkError(f"vLLM cannot read {model.name}: give --hf-python, or a folder as --model.")
        with tempfile.TemporaryDirectory(prefix="bench-latency-") as scratch:
            figures = measure(args, model, args.caches or Path(scratch))
        save_part(result_file(args, "latency.json"), {args.dtype: describe_server() | {"figures": figures}})
    except (BenchmarkError, FetchError, OSError, ServerError) as error:
        print(f"bench latency: {error}", file=sys.stderr)
        return 1
    return 0


def measure(args: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    """Return the figures of each part by server, and jaxllm's by those of the others."""
    source, figures = Source(SMOLLM2_VOCAB), {}
    with _servers(args, model, scratch) as running:
        for server in running.values():
            asyncio.run(complete(server, [source.tokens(PROMPT) for _ in range(max(STREAMS))], 16))
            server.wait_idle(60.0 if args.quick else START_SECONDS)  # programs are compiled in the background
        for part in args.parts:
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in running}
            for index in range(1 if args.quick else args.rounds):
                for name in list(running)[:: 1 if index % 2 else -1]:
                    samples[name].append(PARTS[part](running[name], source, args.quick))
                    say(f"{part}, {name}: {samples[name][-1]}")
            figures[part] = _medians(samples)
    return figures


@contextmanager
def _servers(args: argparse.Namespace, model: Path, scratch: Path) -> Iterator[Mapping[str, ServerProcess]]:
    """Run the servers, which have the same settings, until the block ends."""
    flags = ["--dtype", args.dtype, "--max-num-seqs", str(max(STREAMS)), "--kv-cache-memory-bytes", str(KV_BYTES)]
    commands = {"jaxllm": [*serve_command(model), *flags]}
    if args.unlimited:
        commands["unlimited"] = [*serve_command(model), *flags, "--itl-target-ms", "0"]
    if args.vllm_python:
        vllm = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        commands["vllm"] = [*vllm, "--disable-log-stats", *flags]
    with ExitStack() as stack:
        running = {}
        for name, command in commands.items():
            env = environment(command[0], scratch / name)
            say(f"starting {name}")
            log = scratch / name / "log.txt"
            running[name] = stack.enter_context(server_process(command, log, seconds=START_SECONDS, env=env))
        yield running


def _idle(server: ServerProcess, source: Source, is_quick: bool) -> dict[str, float]:
    count = 2 if is_quick else NUM_IDLE
    answers = [asyncio.run(complete(server, [source.tokens(IDLE_PROMPT)], 2))[0] for _ in range(count)]
    return {"ttft_ms_p50": statistics.median(_ttft(each) for each in answers) * 1e3}


def _streams(server: ServerProcess, source: Source, is_quick: bool) -> dict[str, float]:
    sample = {}
    for count in STREAMS[:2] if is_quick else STREAMS:
        prompts = [source.tokens(PROMPT) for _ in range(count)]
        began = time.monotonic()
        answers = asyncio.run(complete(server, prompts, 8 if is_quick else ANSWER))
        seconds = time.monotonic() - began
        of_count = {"tokens_per_second": sum(each.num_tokens for each in answers) / seconds}
        of_count |= _quantiles("ttft_ms", [_ttft(each) for each in answers])
        of_count |= _quantiles("itl_ms", [gap for each in answers for gap in _gaps(each)])
        sample |= {f"{count}: {name}": value for name, value in of_count.items()}
    return sample


def _long(server: ServerProcess, source: Source, is_quick: bool) -> dict[str, float]:
    return asyncio.run(_beside(server, source, is_quick))


async def _beside(server: ServerProcess, source: Source, is_quick: bool) -> dict[str, float]:
    num_streams, num_tokens, length = (4, 60, 600) if is_quick else (NUM_BESIDE, BESIDE_ANSWER, LONG_PROMPT)
    lead = 2.0 if is_quick else LEAD_SECONDS

    async def streams() -> list[tuple[float, float]]:
        """Return the moments between which streams wait for a token, but for the streams' own prompts."""
        answers = await asyncio.gather(*(_ask(server, source.tokens(16), num_tokens) for _ in range(num_streams)))
        begin = max(each.reached[0] for each in answers)
        return [pair for each in answers for pair in pairwise(each.reached) if pair[0] >= begin]

    async def later(seconds: float, length: int) -> Streamed:
        await asyncio.sleep(seconds)
        return await _ask(server, source.tokens(length), 2)

    alone = await streams()
    prompts = later(lead, length), later(1.25 * lead, IDLE_PROMPT)
    beside, long, short = await asyncio.gather(streams(), *prompts)
    meanwhile = [(a, b) for a, b in beside if b > long.began and a < long.reached[0]]
    sample = {"long_ttft_ms": _ttft(long) * 1e3, "short_ttft_ms": _ttft(short) * 1e3}
    for name, gaps in (("alone", alone), ("meanwhile", meanwhile)):
        sample |= _quantiles(f"itl_ms_{name}", [b - a for a, b in gaps])
    return sample | {"itl_p99_meanwhile_by_alone": sample["itl_ms_meanwhile_p99"] / sample["itl_ms_alone_p99"]}


async def _ask(server: ServerProcess, prompt: Sequence[int], num_tokens: int) -> Streamed:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return await stream(server.port, body)


def _ttft(answer: Streamed) -> float:
    return answer.reached[0] - answer.began


def _gaps(answer: Streamed) -> list[float]:
    return [after - before for before, after in pairwise(answer.reached)]


def _quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile in milliseconds; a single value is both."""
    values = sorted(seconds)
    return {f"{name}_{key}": values[round(q * (len(values) - 1))] * 1e3 for key, q in (("p50", 0.5), ("p99", 0.99))}


def _medians(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the medians of the rounds by server, and of jaxllm's by another server's in the same round."""
    row: dict[str, Any] = {
        name: {key: round(statistics.median(each[key] for each in of_server), 2) for key in of_server[0]}
        for name, of_server in samples.items()
    }
    ours = samples["jaxllm"]
    for name, of_server in samples.items():
        if name != "jaxllm":
            pairs = list(zip(ours, of_server, strict=True))
            row[f"jaxllm_by_{name}"] = {
                key: round(statistics.median(our[key] / their[key] for our, their in pairs), 3) for key in ours[0]
            }
    return row


PARTS = {"idle": _idle, "streams": _streams, "long": _long}

if __name__ == "__main__":
    sys.exit(main())

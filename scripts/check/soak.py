"""Load a server with mixed requests for a long time; check that no answer is wrong or lost, and nothing leaks.

    scripts/check.py soak --minutes 30       # SmolLM2; writes benchmarks/results/soak_server.json
    scripts/check.py soak --pictures 2000    # a model that sees; writes benchmarks/results/soak_pictures.json
    scripts/check.py soak --api-server-count 2 --minutes 10    # writes benchmarks/results/soak_front_ends.json

`jaxllm serve` runs with a KV cache so small that requests are preempted. Each of a catalogue of random requests (chats
and completions, n, seeds, log-probabilities of answers and prompts, grammars, echo, stop strings, long prompts, shared
prefixes) is answered alone first. Then many clients come at once, and after them clients come at random: they read
whole answers or streams, some slowly, some disconnect, some send invalid requests, some call the other routes. Every
answer is compared with the answer to the request alone, to the last digit. Every phase of load ends in rest: nothing
may run or wait, all KV blocks must be free, and memory, threads and file descriptors of front end and core are counted.
At the end SIGTERM comes in the middle of streams, which are read to their end. The first quarter of the time is
warm-up; the slope of the memory is that of the rest, plus or minus twice its standard error: "?" means that the run was
too short. The exit status is 1 if anything was wrong.

With `--api-server-count 2` the server has two front ends, and one is killed under each load. The connections that it
had, by their clients' ports, may fail then, and no others; another front end must take its place. At rest no count of
/metrics may have fallen, every answer must be counted once, but for those of the victim's last second, one request must
get the whole bound, and then no front end may take another.

With `--pictures N` the model is a small Qwen2-VL with random weights, and half of the requests have pictures or videos
between their texts: some that the caches know, some under new names, so that they are processed and encoded again. The
load ends when N of them have come and the time is over. Before it, each of these requests is also asked about other
pictures of the same sizes: most answers must differ. Damaged, huge and forbidden items come too. At rest no item may
be in use in the feature cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fetch_models import FetchError
from lib.front_end import serve_command
from lib.results import describe_server, find_model, make_server_parser, result_file, save
from lib.servers import ServerError, server_process

from check.soaking.front_ends import MOST_QUEUED
from check.soaking.pictures import BAD_PICTURES, make_model, make_picture_asks
from check.soaking.report import report, show
from check.soaking.requests import BAD, Ask, Lengths, make_asks
from check.soaking.server_soak import ServerSoak

LENGTHS = Lengths(words=40, long_words=400, max_tokens=48)
FLAGS = (
    *("--max-model-len", "768", "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-logprobs", "5"),
    *("--block-size", "16", "--num-gpu-blocks-override", "50", "--dtype", "bfloat16", "--batch-invariant"),
)
"""The KV cache has room for little more than one long request. Answers depend on nothing but the request."""
NUM_ASKS = 60
QUICK_PICTURES = 50
"""The most requests with pictures that a quick run waits for."""
PICTURE_LENGTHS = Lengths(words=12, long_words=80, max_tokens=24)
PICTURE_FLAGS = (
    *(*FLAGS, "--load-format", "dummy", "--mm-processor-cache-gb", "0.03"),
    *("--limit-mm-per-prompt", json.dumps({"image": 4, "video": 1})),
)
"""A word has some four tokens there. Processed items take 0.03 to 3 MB, so that they leave the cache all the time."""
DEV_MODE = {"JAXLLM_SERVER_DEV_MODE": "1"}
"""Lets the soak empty the prefix cache, which shows whether all blocks are free."""


def main() -> int:
    """Run a soak; returns the exit status."""
    parser = make_server_parser(__doc__)
    parser.add_argument("--minutes", type=float, help="of load (default: 30, or 6 with --pictures)")
    parser.add_argument("--pictures", type=int, default=0, metavar="N", help="at least N requests with pictures")
    parser.add_argument(
        "--phase-seconds", type=float, default=15.0, help="of load between rests (default: %(default)s)"
    )
    parser.add_argument(
        "--api-server-count",
        type=int,
        default=1,
        metavar="N",
        help="front ends; with several, one is killed each phase",
    )
    parser.add_argument("--clients", type=int, default=12, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise the server would outlive this process
    minutes = args.minutes or (6.0 if args.pictures else 30.0)
    seconds, phase_seconds = (30.0, 5.0) if args.quick else (minutes * 60, args.phase_seconds)
    out = result_file(args, _record_name(args))
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
            record = _soak(args, Path(scratch), seconds, phase_seconds)
    except (FetchError, OSError, ServerError) as error:
        print(f"soak: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("soak: interrupted", file=sys.stderr)
        return 130
    show(record)
    save(out, describe_server() | record)
    return 1 if False in record["goals_reached"].values() else 0


def _record_name(args: argparse.Namespace) -> str:
    if args.pictures:
        return "soak_pictures.json"
    return "soak_server.json" if args.api_server_count == 1 else "soak_front_ends.json"


def _soak(args: argparse.Namespace, scratch: Path, seconds: float, phase_seconds: float) -> dict[str, Any]:
    """Start a server, load it, and return the record."""
    source = random.Random(args.seed)
    others: dict[Ask, Ask] = {}
    if args.pictures:
        (scratch / "model").mkdir()
        model, name, flags, bad = make_model(scratch / "model"), "Qwen2-VL, random", PICTURE_FLAGS, BAD + BAD_PICTURES
        asks = make_asks(source, NUM_ASKS // 2, PICTURE_LENGTHS)
        seed = source.random()
        seeing, other = (
            make_picture_asks(random.Random(seed), NUM_ASKS // 2, PICTURE_LENGTHS, drawing=drawing)
            for drawing in (0, 1)
        )
        asks += seeing
        others = dict(zip(seeing, other, strict=True))
    else:
        model, flags, bad = find_model(args), FLAGS, BAD
        name, asks = model.name, make_asks(source, NUM_ASKS, LENGTHS)
    if has_several := args.api_server_count > 1:
        flags += ("--api-server-count", str(args.api_server_count), "--max-num-queued-reqs", str(MOST_QUEUED))
    command = [*serve_command(model, *flags), "--shutdown-timeout", "60", "--disable-uvicorn-access-log"]
    with server_process(command, scratch / "server.txt", env=os.environ | DEV_MODE) as server:
        soak = ServerSoak(
            server, source, asks, bad=bad, others=others, num_clients=args.clients, kills_front_ends=has_several
        )
        began = time.monotonic()
        num_pictures = min(args.pictures, QUICK_PICTURES) if args.quick else args.pictures
        asyncio.run(soak.run(seconds, phase_seconds, num_pictures))
        record = report(soak, seconds)
    return record | {"seconds": round(time.monotonic() - began, 1), "model": name, "flags": " ".join(flags)}


if __name__ == "__main__":
    sys.exit(main())

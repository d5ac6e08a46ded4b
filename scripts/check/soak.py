"""Load a server with mixed requests for a long time; check that no answer is wrong or lost, and nothing leaks.

    scripts/check.py soak --minutes 30       # SmolLM2; writes benchmarks/results/soak_server.json

`jaxllm serve` runs with a KV cache so small that requests are preempted. Each of a catalogue of random requests (chats
and completions, n, seeds, log-probabilities of answers and prompts, grammars, echo, stop strings, long prompts, shared
prefixes) is answered alone first. Then many clients come at once, and after them clients come at random: they read
whole answers or streams, some slowly, some disconnect, some send invalid requests, some call the other routes. Every
answer is compared with the answer to the request alone, to the last digit. Every phase of load ends in rest: nothing
may run or wait, all KV blocks must be free, and memory, threads and file descriptors of front end and core are counted.
At the end SIGTERM comes in the middle of streams, which are read to their end. The first quarter of the time is
warm-up; the slope of the memory is that of the rest, plus or minus twice its standard error: "?" means that the run was
too short. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import asyncio
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

from check.soaking.report import report, show
from check.soaking.requests import Lengths
from check.soaking.server_soak import ServerSoak

LENGTHS = Lengths(words=40, long_words=400, max_tokens=48)
FLAGS = (
    *("--max-model-len", "768", "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-logprobs", "5"),
    *("--block-size", "16", "--num-gpu-blocks-override", "50", "--dtype", "bfloat16", "--batch-invariant"),
)
"""The KV cache has room for little more than one long request. Answers depend on nothing but the request."""
DEV_MODE = {"JAXLLM_SERVER_DEV_MODE": "1"}
"""Lets the soak empty the prefix cache, which shows whether all blocks are free."""


def main() -> int:
    """Run a soak; returns the exit status."""
    parser = make_server_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (default: %(default)s)")
    parser.add_argument(
        "--phase-seconds", type=float, default=15.0, help="of load between rests (default: %(default)s)"
    )
    parser.add_argument("--clients", type=int, default=12, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise the server would outlive this process
    seconds, phase_seconds = (30.0, 5.0) if args.quick else (args.minutes * 60, args.phase_seconds)
    out = result_file(args, "soak_server.json")
    try:
        model = find_model(args)
        command = [*serve_command(model, *FLAGS), "--shutdown-timeout", "60", "--disable-uvicorn-access-log"]
        with (
            tempfile.TemporaryDirectory(prefix="soak-") as scratch,
            server_process(command, Path(scratch) / "server.txt", env=DEV_MODE) as server,
        ):
            soak = ServerSoak(server, args.seed, LENGTHS, num_clients=args.clients)
            began = time.monotonic()
            asyncio.run(soak.run(seconds, phase_seconds))
            record: dict[str, Any] = report(soak, seconds)
            record |= {"seconds": round(time.monotonic() - began, 1), "model": model.name, "flags": " ".join(FLAGS)}
    except (FetchError, OSError, ServerError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("soak: interrupted", file=sys.stderr)
        return 130
    show(record)
    save(out, describe_server() | record)
    return 1 if False in record["goals_reached"].values() else 0


if __name__ == "__main__":
    sys.exit(main())

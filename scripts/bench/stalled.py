"""Measure whether clients that do not read, or have vanished, disturb the streams of others.

    scripts/bench.py stalled                # a core without a model, at a fixed pace
    scripts/bench.py stalled --served       # SmolLM2
    Both write benchmarks/results/stalled.json; further flags are the server's.

Well-behaved streams run in each round, beside them in turns: nobody; as many clients again that read; clients that
stopped reading (stalled); clients that read a few bytes a second (slow); and clients that vanished, so that nothing is
acknowledged (half_open: a filter on the client's socket drops all packets). The figure is the 99th
percentile of the time between tokens of the well-behaved streams: its median over the rounds, and the median of its
ratios to the same round with nobody beside. With a model, `reading` shows the cost of the further requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import socket
import statistics
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from fetch_models import FetchError
from lib.front_end import PROMPT_IDS, latencies, mock_server, serve_command
from lib.results import describe_server, find_model, make_server_parser, result_file, save_part
from lib.servers import HOST, ServerError, Streamed, server_process, stream

MOST_RATIO = 1.1
KINDS = ("nobody", "reading", "stalled", "slow", "half_open")
RATE = 50
"""The tokens per second of each stream, where the core has no model."""
NUM_STREAMS, NUM_OTHERS = 16, 16
ROUND_SECONDS, LEAD_SECONDS = 10.0, 4.0
"""Seconds of measuring, and of the other clients before: the buffers between them and the server fill up."""
RECEIVE_BUFFER = 4096
SLOW_BYTES, SLOW_SECONDS = 4, 1.0
SO_ATTACH_FILTER = 26
KV_BYTES = 1 << 30


async def misbehave(kind: str, port: int, body: dict[str, Any], is_begun: asyncio.Event) -> None:
    """Run one client of a kind until cancelled."""
    data = json.dumps(body | {"stream": True}).encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        if kind != "reading":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        await loop.sock_connect(connection, (HOST, port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(connection, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await loop.sock_recv(connection, 1024)
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise ServerError(answer.decode(errors="replace"))
        is_begun.set()
        if kind == "half_open":
            vanish(connection)
        while kind == "reading":
            if not await loop.sock_recv(connection, 1 << 16):
                raise ServerError("a client that reads was cut off")
        while kind == "slow":
            await loop.sock_recv(connection, SLOW_BYTES)
            await asyncio.sleep(SLOW_SECONDS)
        await loop.create_future()


def vanish(connection: socket.socket) -> None:
    """Make the system drop every packet for a socket, acknowledgements too, as if its machine were gone."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of the packet
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


@contextlib.asynccontextmanager
async def others(kind: str, port: int, num: int, body: dict[str, Any], lead_seconds: float) -> AsyncIterator[None]:
    """Run clients of a kind during a block, and `lead_seconds` before it. Raises ServerError if one fails."""
    if kind == "nobody":
        yield
        return
    begun = [asyncio.Event() for _ in range(num)]
    tasks = [asyncio.create_task(misbehave(kind, port, body | {"seed": 7 * i}, task)) for i, task in enumerate(begun)]
    try:
        starting = asyncio.gather(*(task.wait() for task in begun))
        await asyncio.wait([starting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(lead_seconds if starting.done() else 0)
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_round(kind: str, port: int, args: argparse.Namespace) -> list[Streamed]:
    """Return the well-behaved streams of one round."""
    body = {"prompt": PROMPT_IDS, "ignore_eos": True, "temperature": 0}
    long = body | {"max_tokens": args.num_tokens * 100, "logprobs": 20}
    async with others(kind, port, args.others, long, args.lead_seconds):
        wanted = [body | {"max_tokens": args.num_tokens, "seed": 97 * i} for i in range(args.streams)]
        return await asyncio.gather(*(stream(port, each) for each in wanted))


def measure(run: Callable[[str], Coroutine[Any, Any, list[Streamed]]], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each kind, from rounds in turns, every second one in reverse order."""
    rounds_by_kind: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
            rounds_by_kind[kind].append(latencies([asyncio.run(run(kind))])["itl_ms"])
            print(f"round {number + 1} of {rounds}, {kind}: {rounds_by_kind[kind][-1]}", file=sys.stderr)
    quiet = [each["p99"] for each in rounds_by_kind["nobody"]]
    rows = []
    for kind, figures in rounds_by_kind.items():
        ratios = [each["p99"] / base for each, base in zip(figures, quiet, strict=True)]
        rows.append(
            {
                "beside": kind,
                "itl_ms": {name: statistics.median(each[name] for each in figures) for name in ("p50", "p99")},
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(each, 3) for each in ratios],
            }
        )
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return for each kind of misbehaving client whether others are served as if it were absent."""
    return {row["beside"]: row["ratio"] <= MOST_RATIO for row in rows if row["beside"] in KINDS[2:]}


def start(args: argparse.Namespace, model: Path, log: Path) -> Any:
    """Start the server that is measured."""
    flags = ["--max-num-seqs", str(args.streams + args.others), *args.flags]
    if args.served:
        return server_process(serve_command(model, *flags, "--kv-cache-memory-bytes", str(KV_BYTES)), log)
    return mock_server(model, log, *flags, "--tokens-per-second", str(RATE), "--disable-log-stats")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one server and return the record."""
    model = find_model(args)
    facts = describe_server() | {
        "model": model.name,
        "streams": args.streams,
        "others": args.others,
        "tokens_of_a_stream": args.num_tokens,
    }
    with (
        tempfile.TemporaryDirectory(prefix="bench-stalled-") as scratch,
        start(args, model, Path(scratch) / "log.txt") as server,
    ):
        asyncio.run(measure_round("reading", server.port, args))
        if args.served and not args.quick:
            server.wait_idle()
        rows = measure(lambda kind: measure_round(kind, server.port, args), args.rounds)
    return facts | {"rows": rows, "most_ratio": MOST_RATIO, "goals_reached": verdicts(rows)}


def main() -> int:
    """Measure, print and save; returns the exit status."""
    parser = make_server_parser(__doc__)
    parser.add_argument("--served", action="store_true", help="measure a server with a model")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS, help="default: %(default)s")
    parser.add_argument("--others", type=int, default=NUM_OTHERS, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args, args.flags = parser.parse_known_args()
    args.num_tokens, args.lead_seconds = int(ROUND_SECONDS * RATE), LEAD_SECONDS
    if args.served:
        args.num_tokens = 64
    if args.quick:
        args.num_tokens, args.lead_seconds, args.rounds = 8, 0.2, 1
        args.streams = args.others = 2
    out = result_file(args, "stalled.json")
    try:
        part = {"served" if args.served else "mock": run(args)}
    except (FetchError, OSError, ServerError) as error:
        print(f"bench stalled: {error}", file=sys.stderr)
        return 1
    save_part(out, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())

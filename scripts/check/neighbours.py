"""Measure what requests with pictures cost the text streams beside them: the time between tokens.

    scripts/check.py neighbours     # a small Qwen2-VL, random; writes benchmarks/results/neighbours.json

In each turn some text streams run, and beside them come, at the same random times, requests with one to four new
pictures each, or requests of text alone with as many new prompt tokens, or nothing. The figures are quantiles of the
times between two tokens of a stream: of those that a request beside overlaps, from its sending to its answer, and of
all where nothing comes. The 99th percentile with pictures may be at most 1.1 times that with text, which has to be
clearly more than that with nothing: otherwise the requests are not felt, and the ratio says nothing. Both kinds must
have the same requests and prompt tokens answered. The exit status is 1 if a goal is missed or a request fails.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lib.front_end import serve_command
from lib.results import describe_server, make_parser, result_file, save
from lib.servers import ServerError, ask, server_process, stream

from check.soaking.pictures import make_model, picture_url
from check.soaking.requests import CHAT, COMPLETIONS
from check.soaking.watch import Watch

MOST_BY_TEXT = 1.1
LEAST_BY_NOTHING = 1.5
FLAGS = (
    *("--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--dtype", "bfloat16"),
    *("--load-format", "dummy", "--num-gpu-blocks-override", "2000", "--disable-uvicorn-access-log"),
)
WIDTH, TOWER_WIDTH = 768, 576
"""The size of the model: a step takes so long that the client reads one token at a time.

The tower's layers have 0.45 times the weights of the text model's, as in Qwen2-VL with 2 billion parameters (0.48).
"""
SIDES = (224, 280, 336)
"""Widths and heights of pictures in pixels: they take 64 to 144 tokens each."""
NUM_PICTURES = (1, 1, 2, 3, 4)
"""The numbers of pictures of the requests beside, in random order."""
KINDS = ("text", "pictures", "nothing")
NUM_STREAMS, STREAM_TOKENS = 4, 1000
LEAD_TOKENS = 20
"""The first tokens of a stream, which do not count: the streams' own prompts are computed meanwhile."""
ANSWER_TOKENS = 4
"""The tokens of an answer beside the streams."""
SPACING = 1.0
"""The mean seconds between two requests beside: all come while the streams run."""


@dataclass(frozen=True)
class Answered:
    """A request beside the streams: when it was sent and answered, in seconds, and the tokens of its prompt."""

    began: float
    ended: float
    num_tokens: int


@dataclass(frozen=True)
class Turn:
    """What came beside the streams in a turn, and when each stream's tokens came, in seconds."""

    beside: Sequence[Answered]
    reached: Sequence[Sequence[float]]

    def gaps(self) -> list[float]:
        """Return the seconds between tokens that a request beside overlaps, or all if there was none."""
        pairs = [pair for times in self.reached for pair in pairwise(times)]
        return [
            after - before
            for before, after in pairs
            if not self.beside or any(one.began < after and before < one.ended for one in self.beside)
        ]

    def num_felt(self) -> int:
        """Return the number of requests that overlap a stream."""
        return sum(any(one.began < times[-1] and times[0] < one.ended for times in self.reached) for one in self.beside)


def main() -> int:
    """Measure; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=6, help="of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="shows that all runs, measures nothing and saves nothing")
    args = parser.parse_args()
    num_turns = 1 if args.quick else args.turns
    try:
        with tempfile.TemporaryDirectory(prefix="neighbours-") as scratch:
            folder = Path(scratch, "model")
            folder.mkdir()
            command = serve_command(make_model(folder, WIDTH, TOWER_WIDTH), *FLAGS)
            with server_process(command, Path(scratch, "server.txt")) as server:
                asyncio.run(Watch(server).warm())
                turns = asyncio.run(_measure(server.port, num_turns))
    except (OSError, ServerError) as error:
        print(f"neighbours: {error}", file=sys.stderr)
        return 1
    record = report(turns) | {"turns": num_turns, "flags": " ".join(FLAGS)}
    for name, value in record.items():
        print(f"{name:24}{value}")
    save(result_file(args, "neighbours.json"), describe_server() | record)
    return 0 if args.quick or all(record["goals_reached"].values()) else 1


async def _measure(port: int, num_turns: int) -> dict[str, list[Turn]]:
    """Return the turns by what came beside. Raises ServerError if a request fails."""
    turns: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    lengths = {side: await _count_tokens(port, [side]) for side in SIDES}
    frame = 2 * lengths[SIDES[0]] - await _count_tokens(port, [SIDES[0]] * 2)
    rows = {side: length - frame for side, length in lengths.items()}
    for number in range(num_turns):
        for kind in KINDS:
            turns[kind].append(await _turn(port, _requests(kind, frame, rows, random.Random(number))))
        print(f"neighbours: {number + 1} of {num_turns} turns", file=sys.stderr)
    return turns


async def _count_tokens(port: int, sides: Sequence[int]) -> int:
    """Return the prompt tokens of a request with pictures."""
    return (await ask(port, _with_pictures(sides, 0), CHAT))["usage"]["prompt_tokens"]


async def _turn(port: int, requests: Sequence[tuple[float, str, dict[str, Any]]]) -> Turn:
    """Run streams with requests beside them, and read all to the end. Raises ServerError if one fails."""
    bodies = [
        {"prompt": f"stream {index}", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "seed": index}
        for index in range(NUM_STREAMS)
    ]
    began = time.monotonic()
    beside = asyncio.gather(*(_ask(port, began + start, path, body) for start, path, body in requests))
    answered, streamed = await asyncio.gather(beside, asyncio.gather(*(stream(port, body) for body in bodies)))
    return Turn(answered, [answer.reached[LEAD_TOKENS:] for answer in streamed])


async def _ask(port: int, start: float, path: str, body: dict[str, Any]) -> Answered:
    await asyncio.sleep(start - time.monotonic())
    began = time.monotonic()
    answer = await ask(port, body, path)
    return Answered(began, time.monotonic(), answer["usage"]["prompt_tokens"])


def _requests(
    kind: str, frame: int, rows: Mapping[int, int], source: random.Random
) -> list[tuple[float, str, dict[str, Any]]]:
    """Return the seconds until each request beside, its path and its body.

    A prompt with pictures has `frame` tokens, and for each picture those in `rows`, by its side.
    """
    requests, start = [], 0.0
    for num in source.sample(NUM_PICTURES, len(NUM_PICTURES)) if kind != "nothing" else ():
        start += source.uniform(0.5, 1.5) * SPACING
        sides, seed = source.choices(SIDES, k=num), source.randrange(2**31)
        if kind == "pictures":
            requests.append((start, CHAT, _with_pictures(sides, seed)))
        else:
            ids = random.Random(seed).choices(range(20, 250), k=frame + sum(rows[side] for side in sides))
            requests.append((start, COMPLETIONS, {"prompt": ids, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}))
    return requests


def _with_pictures(sides: Sequence[int], seed: int) -> dict[str, Any]:
    """Return the body of a chat with square pictures that no cache has."""
    parts: list[dict[str, Any]] = [
        {
            "type": "image_url",
            "image_url": {"url": picture_url(side, side, seed + index)},
            "uuid": f"{len(sides)} {index} {side} {seed}",
        }
        for index, side in enumerate(sides)
    ]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
    return {"messages": [message], "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


def report(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Return the quantiles of the times between tokens in milliseconds, their ratios, and whether the goals are met."""
    figures = {kind: _quantiles([gap for turn in of_kind for gap in turn.gaps()]) for kind, of_kind in turns.items()}
    beside = {kind: _count(turns[kind]) for kind in ("text", "pictures")}
    text, pictures, nothing = (figures[kind]["p99"] for kind in KINDS)
    goals = {
        f"p99 with pictures at most {MOST_BY_TEXT:g} times that with text": pictures <= MOST_BY_TEXT * text,
        f"p99 with text at least {LEAST_BY_NOTHING:g} times that with nothing": text >= LEAST_BY_NOTHING * nothing,
        "as many requests and tokens of both kinds, all beside the streams": beside["text"] == beside["pictures"]
        and beside["text"]["felt"] == beside["text"]["requests"],
    }
    return {
        **{f"itl_ms_{kind}": of_kind for kind, of_kind in figures.items()},
        **{f"beside_{kind}": counts for kind, counts in beside.items()},
        "pictures_by_text": round(pictures / text, 3),
        "pictures_by_nothing": round(pictures / nothing, 3),
        "text_by_nothing": round(text / nothing, 3),
        "goals_reached": goals,
    }


def _count(turns: Sequence[Turn]) -> dict[str, int]:
    """Return the numbers of answered requests, of their prompt tokens, and of those that overlap a stream."""
    return {
        "requests": sum(len(turn.beside) for turn in turns),
        "prompt_tokens": sum(one.num_tokens for turn in turns for one in turn.beside),
        "felt": sum(turn.num_felt() for turn in turns),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return quantiles and the mean, in milliseconds, and the number of times."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    figures = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "mean": statistics.fmean(seconds)}
    return {name: round(1e3 * value, 2) for name, value in figures.items()} | {"gaps": len(seconds)}


if __name__ == "__main__":
    sys.exit(main())

"""Measure the cost of the HTTP server, and the throughput and latency of its streams.

    scripts/bench.py frontend --mock         # the server's process alone; writes benchmarks/results/frontend.json
    scripts/bench.py frontend --served       # with SmolLM2, beside LLM.generate
    scripts/bench.py frontend --peers --vllm-python DIR/vllm/bin/python --hf-python DIR/hf/bin/python

--mock    CPU time of the server's process per token and per request, the client's beside it; of each of a token's
          stages alone; and the delay from the core's step to the client's socket, by the kernel's time stamps, at 50
          tokens per second and stream, also until the client has read it. The core has no model (lib/mock_core.py).
          With --before DIR, a folder of other sources (git worktree), their server has its rounds in turns with this
          one's. "computed" has the processors that 60,000 tokens per second take, from the costs of a token.
--served  tokens per second of 1, 16 and 64 streams by those of LLM.generate with the same prompts, in turns, with the
          times to the first token and between tokens.
--peers   the same streams beside vLLM's server, in turns: both read one bfloat16 checkpoint, which --hf-python writes
          the first time, and have the same settings; first their outputs are compared with jaxllm's in float32.
          `scripts/peers.sh DIR hf vllm` makes the environments.

Figures are medians of rounds. Other load on the machine distorts wall times, but not CPU times and ratios.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from fetch_models import FetchError
from lib import front_end, front_stages
from lib.results import describe_server, find_model, make_server_parser, result_file, save_part
from lib.servers import ServerError
from peers import servers as peer_servers
from peers.checkpoint import checkpoint
from peers.worker import BenchmarkError

GOALS = {
    "server_cpu_us_per_token": 15.0,
    "request_ms": 1.0,
    "request_us_per_prompt_token": 2.5,
    "delay_ms_p50": 0.5,
    "delay_ms_p99": 5.0,
    "ratio": 0.95,
    "by_vllm": 1.0,
}
STREAMS = ((1, 2000), (64, 1000), (256, 500), (1024, 250))
"""Numbers of streams, and of tokens of each."""
SIZES = (100, 4000)
TOKENS_PER_SECOND = 60_000
"""The speed for which processes are computed."""
NUM_FRONT_ENDS = 4
BUSY_SHARE = 0.5
"""How busy a front end may be on average, so that its streams do not wait."""
KV_BYTES = 1 << 30
SMOLLM2_VOCAB = 49152


def measure_mock(args: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    """Return the cost of the server's process."""
    streams = [(num, 20) for num, _ in STREAMS] if args.quick else STREAMS
    saturated = front_end.measure_saturated(model, streams, 1 if args.quick else args.rounds, scratch, args.before)
    return {
        "saturated": saturated,
        "computed": compute_processes(saturated, front_stages.measure_messages(model, 256, NUM_FRONT_ENDS)),
        "stages": [front_stages.measure_stages(model, num) for num in (64, 256, 1024)],
        "paced": [front_end.measure_delays(model, num, 10 if args.quick else 250, scratch) for num in (1, 64)],
        "requests": front_end.measure_requests(model, SIZES, 5 if args.quick else 200, scratch),
    }


def compute_processes(saturated: list[Any], messages: dict[str, Any]) -> dict[str, Any]:
    """Return how many processors `TOKENS_PER_SECOND` take, computed from the costs of a token at 256 streams."""
    cost = max(row["server_cpu_us_per_token"] for row in saturated if row["streams"] == messages["streams"])
    cores = {"front ends": cost, **messages["us_per_token"]}
    busy = {name: round(each * TOKENS_PER_SECOND / 1e6, 2) for name, each in cores.items()}
    num = math.ceil(busy["front ends"] / BUSY_SHARE)
    print(
        f"computed: {TOKENS_PER_SECOND} tokens/s keep {busy['front ends']} processors busy in front ends, so "
        f"--api-server-count {num} with each at most {BUSY_SHARE:.0%} busy; {busy}",
        file=sys.stderr,
    )
    facts = {"tokens_per_second": TOKENS_PER_SECOND, "us_per_token": cores, "busy_processors": busy}
    return facts | {"front_ends": num, "busy_share_of_a_front_end_at_most": BUSY_SHARE}


def measure_served(args: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    """Return the server's throughput and latency with SmolLM2."""
    rows = front_end.measure_served(
        model,
        (1, 16, 64),
        rounds=2 if args.quick else args.rounds,
        num_tokens=4 if args.quick else 128,
        vocab_size=SMOLLM2_VOCAB,
        engine={"max_num_seqs": 64, "kv_cache_memory_bytes": KV_BYTES},
        scratch=scratch,
    )
    return {"beside_llm_generate": rows}


def measure_peers(args: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    """Return the figures of jaxllm's and vLLM's servers with SmolLM2. Raises BenchmarkError without a checkpoint."""
    folder = checkpoint(model, args.hf_python)
    if not folder.is_dir():
        raise BenchmarkError(f"vLLM cannot read {folder.name}: give --hf-python, or a folder as --model.")
    return peer_servers.measure_peers(
        folder,
        args.vllm_python,
        (1, 16, 64),
        dtype=args.dtype,
        rounds=1 if args.quick else args.rounds,
        num_tokens=8 if args.quick else 128,
        vocab_size=SMOLLM2_VOCAB,
        scratch=scratch,
    )


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Return which goals the figures of a part reach."""
    reached: dict[str, bool] = {}
    if rows := figures.get("saturated"):
        cost = max(row["server_cpu_us_per_token"] for row in rows if row["streams"] in (64, 256))
        reached["server_cpu_us_per_token"] = cost <= GOALS["server_cpu_us_per_token"]
        delay = figures["paced"][-1]["delay_ms"]
        reached |= {f"delay_ms_{name}": delay[name] <= GOALS[f"delay_ms_{name}"] for name in delay}
        reached["request_ms"] = all(
            row["server_cpu_ms"]
            <= GOALS["request_ms"] + row["prompt_tokens"] * GOALS["request_us_per_prompt_token"] / 1e3
            for row in figures["requests"]
        )
    if rows := figures.get("beside_llm_generate"):
        reached["ratio"] = all(row["ratio"] >= GOALS["ratio"] for row in rows)
    if rows := figures.get("beside_vllm"):
        reached["by_vllm"] = all(row["jaxllm_by_vllm"]["tokens_per_second"] >= GOALS["by_vllm"] for row in rows)
    return reached


def main() -> int:
    """Measure, print and save; returns the exit status."""
    parser = make_server_parser(__doc__)
    parser.add_argument("--mock", action="store_true", help="measure the server's process alone")
    parser.add_argument("--before", type=Path, metavar="DIR", help="other sources to measure in turns, with --mock")
    parser.add_argument("--served", action="store_true", help="measure beside LLM.generate")
    parser.add_argument("--peers", action="store_true", help="measure beside vLLM's server")
    for peer in ("vllm", "hf"):
        parser.add_argument(f"--{peer}-python", metavar="PATH", help=f"Python of scripts/peers.sh DIR {peer}")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of --peers")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    parts = {"mock": measure_mock, "served": measure_served, "peers": measure_peers}
    chosen = [name for name in parts if getattr(args, name)]
    if not chosen:
        parser.error("give --mock, --served, --peers, or several")
    if args.peers and not args.vllm_python:
        parser.error("--peers needs --vllm-python")
    out = result_file(args, "frontend.json")
    try:
        model = find_model(args)
        for name in chosen:
            facts = describe_server() | {"model": model.name}
            with tempfile.TemporaryDirectory(prefix="bench-frontend-") as scratch:
                figures = parts[name](args, model, Path(scratch))
            reached = {"goals": GOALS, "goals_reached": verdicts(figures)}
            save_part(out, {name: facts | {"figures": figures} | reached})
    except (BenchmarkError, FetchError, OSError, ServerError) as error:
        print(f"bench frontend: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

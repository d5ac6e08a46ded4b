"""Measure the first host's cost of sending steps to the others: its work per step, for 1 to 64 hosts.

    scripts/bench.py hosts [--hosts 1 2 4 8 16 32 64] [--seqs 256] [--steps 300] [--json OUT]

The core is real: scheduler, batches and broadcast, with block tables of 8,192 tokens. No device computes: steps answer
at once. The other hosts are processes of this machine that receive each launch over TCP, decode it and do nothing, so
sending costs at least as much as between machines. With more processes than cores, wall time is too long; so the
leader's CPU time stands beside it. Steps decode one token of each sequence.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from lib.machine import ROOT, describe_machine
from lib.results import make_parser, save

STEP_MS = 20.0
"""The time of a large model's step; shares are of this."""
WARM_UP = 20


def receive(address: str, port: str, key: str, rank: str) -> int:
    """Run as a host that receives launches and does nothing."""
    from jaxllm.engine.core.hosts.link import connect
    from jaxllm.engine.core.hosts.wire import Beat, End

    link = connect(address, int(port), bytes.fromhex(key), int(rank))
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(1.0):
            link.send(Beat())

    threading.Thread(target=beat, daemon=True).start()
    while not isinstance(link.receive(), End):
        pass
    is_over.set()
    return 0


class Answers:
    """Replaces an array of sampled tokens on a device."""

    def __init__(self, count: int) -> None:
        self._tokens = np.full(count, 7, np.int32)

    def copy_to_host_async(self) -> None:
        """Do nothing: the tokens are on the host."""

    def is_ready(self) -> bool:
        """Return True: the tokens are on the host."""
        return True

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self._tokens


class Recorder:
    """Sends launches to the hosts of a group, and records their bytes and the time of sending."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.sizes: list[int] = []
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def broadcast(self, launch: Any) -> None:
        """Send a launch."""
        from jaxllm.engine.core.hosts.wire import encode

        self.sizes.append(len(encode(launch)))
        wall, cpu = time.perf_counter(), time.thread_time()
        if self._group is not None:
            self._group.broadcast(launch)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)


def make_engine(num_seqs: int) -> Any:
    """Return an engine that compiles nothing."""
    from jaxllm.engine.offline.llm_engine import LLMEngine
    from jaxllm.resolve.engine_args import EngineArgs

    settings: dict[str, Any] = {
        "model": str(ROOT / "tests" / "data" / "tiny" / "llama3_tied"),
        "skip_tokenizer_init": True,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": 2 * num_seqs,
        "max_model_len": 8192,
        "hf_overrides": {"max_position_embeddings": 8192},
        "block_size": 64,
        "num_gpu_blocks_override": 2 + num_seqs * 10,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    return LLMEngine.from_engine_args(EngineArgs(**settings))


def measure(engine: Any, num_hosts: int, num_seqs: int, num_steps: int) -> dict[str, float]:
    """Return medians over steps that are sent to `num_hosts` hosts."""
    from jaxllm import SamplingParams
    from jaxllm.engine.core.hosts.host_group import HostGroup
    from jaxllm.engine.core.hosts.link import accept
    from jaxllm.execution.step import StepOutput

    key, processes, group = secrets.token_bytes(16), [], None
    if num_hosts > 1:
        with socket.create_server(("127.0.0.1", 0), backlog=num_hosts) as server:
            port = server.getsockname()[1]
            for rank in range(1, num_hosts):
                command = [sys.executable, ROOT / "scripts/bench.py", "hosts", "--receive"]
                command += ["127.0.0.1", str(port), key.hex(), str(rank)]
                processes.append(subprocess.Popen(command))
            group = HostGroup(accept(server, key, num_hosts - 1, 120))
    runner, recorder = engine._core._core._runner, Recorder(group)
    runner._broadcast = recorder.broadcast
    count = runner.compiler.shapes.max_rows
    tokens: Any = Answers(count)
    runner.launcher.launch = lambda _: StepOutput(tokens, None)
    params = SamplingParams(temperature=0.7, max_tokens=num_steps + 2 * WARM_UP, ignore_eos=True, detokenize=False)
    ids = [f"{num_hosts}-{index}" for index in range(num_seqs)]
    for request_id in ids:
        engine.add_request(request_id, {"prompt_token_ids": [5] * 4}, params)
    for _ in range(WARM_UP):
        engine.step()
    start, wall, cpu = len(recorder.wall), [], []
    core = engine._core._core
    for _ in range(num_steps):  # only the core: a server's front end is another process
        began, thread = time.perf_counter(), time.thread_time()
        core.step()
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - thread)
    engine.abort_request(ids)
    core.abort_requests(list(core._live))
    while engine.has_unfinished_requests():
        engine.step()
    if group is not None:
        group.close()
    for process in processes:
        process.wait()
    milliseconds = {
        "step": statistics.median(wall),
        "step_own": statistics.median(cpu),
        "broadcast": statistics.median(recorder.wall[start : start + num_steps]),
        "broadcast_own": statistics.median(recorder.cpu[start : start + num_steps]),
    }
    row = {f"{name}_ms": round(1000 * value, 3) for name, value in milliseconds.items()}
    size = int(statistics.median(recorder.sizes[start : start + num_steps]))
    return {"hosts": num_hosts, "bytes": size, **row, "share": round(row["step_own_ms"] / STEP_MS, 3)}


def main() -> int:
    """Measure and print a table."""
    if sys.argv[1:2] == ["--receive"]:
        return receive(*sys.argv[2:])
    parser = make_parser(__doc__, "hosts.json")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seqs", type=int, default=256, help="sequences that run; default: 256")
    parser.add_argument("--steps", type=int, default=300, help="steps that are measured; default: 300")
    args = parser.parse_args()
    engine, rows = make_engine(args.seqs), []
    print("| hosts | a launch, KiB | broadcast, ms | of the leader's own | step, ms | own | share of 20 ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_hosts in args.hosts:
        rows.append(row := measure(engine, num_hosts, args.seqs, args.steps))
        cells = [row["hosts"], f"{row['bytes'] / 1024:.1f}", row["broadcast_ms"], row["broadcast_own_ms"]]
        cells += [row["step_ms"], row["step_own_ms"], f"{row['share']:.0%}"]
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    save(args.json, describe_machine() | {"seqs": args.seqs, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

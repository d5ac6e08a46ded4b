"""Check that no process of a model over several hosts outlives a lost one: kill one of them, again and again.

    scripts/check.py hosts [--hosts 2 4] [--times 10]

The hosts are processes of this machine, joined by jax.distributed, which run requests without end. Each time another
host is killed at a random moment (kill -9), or stopped like a machine that hangs (kill -STOP, about every third time).
All others must end within 10 s, with a status other than 0, and name it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.test_hosts import END_SECONDS, STATUSES, started

ROOT = Path(__file__).resolve().parents[2]
os.environ["PYTHONPATH"] = str(ROOT)
NOWHERE = Path(os.devnull)


def main() -> int:
    """Kill hosts; return 0 if the others always ended as they must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--times", type=int, default=10, help="kills for each number of hosts; default: 10")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, failures, slowest = random.Random(args.seed), 0, 0.0
    for num_hosts in args.hosts:
        for time_index in range(args.times):
            killed = time_index % num_hosts
            number = signal.SIGSTOP if time_index % (num_hosts + 1) == num_hosts - 1 else signal.SIGKILL
            with started("for_ever", num_hosts, 1, NOWHERE, ROOT) as processes:
                wait_until_it_runs(processes[0])
                time.sleep(rng.uniform(0, 1))
                processes[killed].send_signal(number)
                seconds, wrong = watch(processes, killed)
            failures += bool(wrong)
            slowest = max(slowest, seconds)
            print(f"{num_hosts} hosts, {number.name} of host {killed}: {wrong or f'all ended in {seconds:.1f} s'}")
    total = len(args.hosts) * args.times
    print(f"{total - failures} of {total} as they must, the slowest in {slowest:.1f} s")
    return 1 if failures else 0


def wait_until_it_runs(process: subprocess.Popen[str]) -> None:
    """Wait for the first requests to be done. Raises SystemExit if the engine does not come up."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "runs\n":
        if not line:
            raise SystemExit("the engine has not come up")


def watch(processes: Sequence[subprocess.Popen[str]], killed: int) -> tuple[float, str]:
    """Wait for all hosts except the killed one; return the seconds and the list of problems."""
    began, wrong = time.monotonic(), []
    for rank, process in enumerate(processes):
        if rank == killed:
            continue
        try:
            said, _ = process.communicate(timeout=max(0.1, began + END_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            wrong.append(f"host {rank} has not ended")
            continue
        if process.returncode not in STATUSES:
            wrong.append(f"host {rank} has ended with status {process.returncode}")
        if f"host {killed} " not in said or "lost" not in said:
            wrong.append(f"host {rank} does not name the lost one: {said[-600:]}")
    return time.monotonic() - began, "; ".join(wrong)


if __name__ == "__main__":
    sys.exit(main())

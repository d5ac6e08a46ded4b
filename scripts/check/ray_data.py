"""Kill docs/examples/ray_data.py and restart it, again and again: no row may be lost or written twice.

    scripts/check.py ray_data [MODEL] [--rows 20000] [--kills 4] [--json OUT]

MODEL is SmolLM2 by default. The dataset is larger than the memory that Ray may use. The example is killed (kill -9) at
random moments; between two kills its engine is killed, which Ray then restarts with its batch. In the end each row must
be there once, unchanged, with the answer that a single engine gives (a sample is compared). Needs the extra:
pip install 'jaxllm[ray]'.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa  # pyright: ignore[reportMissingImports]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]
from lib.evidence import Evidence
from lib.machine import describe_machine

from check.replicas import MODEL, WORDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "ray_data.py"
FILES, PADDING, STORE_BYTES = 40, 12_000, 100_000_000
MAX_TOKENS, SAMPLE = 3, 200


def main() -> int:
    """Run the example to its end, with kills; return 0 if all rows are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--rows", type=int, default=20_000, help="default: 20000")
    parser.add_argument("--kills", type=int, default=4, help="kills of the whole run; default: 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_prompts(folder / "prompts", args.rows, rng)
        facts = {"num_rows": args.rows, "dataset_mb": size // 10**6, "memory_of_ray_mb": STORE_BYTES // 10**6}
        evidence = Evidence(args.json, describe_machine() | {"model": args.model.stem} | facts)
        ray = [Path(sys.executable).with_name("ray")]
        start = ["start", "--head", "--num-cpus=2", f"--object-store-memory={STORE_BYTES}", "--include-dashboard=false"]
        subprocess.run([*ray, *start], check=True, stdout=subprocess.DEVNULL)
        try:
            for number in range(args.kills):
                evidence.add({"run": number} | run_until_killed(args.model, folder, rng))
            began = time.perf_counter()
            status = command(args.model, folder).wait()
            written = read_answers(folder / "answers")
            missed = [] if status == 0 else [f"it ended with status {status}"]
            evidence.add({"run": args.kills, "seconds": round(time.perf_counter() - began), "missed": missed})
        finally:
            subprocess.run([*ray, "stop", "--force"], check=True, stdout=subprocess.DEVNULL)
        evidence.add(compare(args.model, written, folder / "prompts", rng))
        return evidence.finish()


def write_prompts(folder: Path, num_rows: int, rng: random.Random) -> int:
    """Write prompts with incompressible bytes beside them into several files, and return the number of bytes."""
    folder.mkdir()
    for number in range(FILES):
        ids = [f"row-{index}" for index in range(number, num_rows, FILES)]
        table: dict[str, Any] = {"id": ids, "prompt": [" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) for _ in ids]}
        table["padding"] = [rng.randbytes(PADDING) for _ in ids]
        pq.write_table(pa.table(table), folder / f"{number}.parquet")
    return sum(file.stat().st_size for file in folder.iterdir())


def command(model: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start the example."""
    folders = [folder / "prompts", folder / "answers", "--progress", folder / "progress"]
    options = ["--batch", "256", "--max-tokens", str(MAX_TOKENS)]
    log = (folder / "log").open("ab")
    environment = os.environ | {"RAY_ADDRESS": "auto", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, EXAMPLE, model, *folders, *options], stdout=log, stderr=subprocess.STDOUT, env=environment
    )


def run_until_killed(model: Path, folder: Path, rng: random.Random) -> dict[str, object]:
    """Kill the example's engine, and later the example; return the number of rows written by then."""
    process, before = command(model, folder), count(folder / "answers")
    wait_for_more(process, folder, before)
    engine = kill_engine()
    wait_for_more(process, folder, count(folder / "answers"))
    time.sleep(rng.uniform(0, 5))
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(50):  # Ray ends what the example has started
        if not engines():
            break
        time.sleep(0.2)
    return {"written_before": before, "engine_killed": engine, "written": count(folder / "answers")}


def engines() -> list[psutil.Process]:
    """Return the actors that have an engine."""
    return [
        each for each in psutil.process_iter(["name", "cmdline"]) if "Generate" in " ".join(each.info["cmdline"] or [])
    ]


def kill_engine() -> bool:
    """Kill the actor that has the engine; return whether there was one."""
    actors = engines()
    for actor in actors:
        actor.kill()
    return bool(actors)


def wait_for_more(process: subprocess.Popen[bytes], folder: Path, before: int) -> None:
    """Wait until more rows are written than before. Raises SystemExit if the example has ended instead."""
    while count(folder / "answers") <= before:
        if process.poll() is not None:
            raise SystemExit(f"the example has ended:\n{(folder / 'log').read_text()[-4000:]}")
        time.sleep(0.5)


def count(folder: Path) -> int:
    """Return the number of rows that are written."""
    return sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))


def read_answers(folder: Path) -> pa.Table:
    """Return all rows that are written."""
    return pa.concat_tables(pq.read_table(file) for file in folder.glob("*.parquet"))


def compare(model: Path, written: pa.Table, prompts: Path, rng: random.Random) -> dict[str, object]:
    """Compare ids, the other columns, and a sample of the answers with those of a single engine."""
    from jaxllm import LLM, SamplingParams

    asked = pa.concat_tables(pq.read_table(file) for file in prompts.glob("*.parquet")).to_pylist()
    rows = {row["id"]: row for row in written.to_pylist()}
    times = Counter(written["id"].to_pylist())
    lost = [row["id"] for row in asked if row["id"] not in times]
    twice = [name for name, number in times.items() if number > 1]
    changed = [row["id"] for row in asked if row["id"] in rows and any(rows[row["id"]][key] != row[key] for key in row)]
    sample = rng.sample(asked, min(SAMPLE, len(asked)))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(str(model), disable_log_stats=True) as llm:
        outputs = llm.generate([row["prompt"] for row in sample], params, use_tqdm=False)
    wrong = [
        row["id"]
        for row, output in zip(sample, outputs, strict=True)
        if row["id"] in rows and rows[row["id"]]["answer"] != output.outputs[0].text
    ]
    problems = {"lost": lost, "twice": twice, "changed": changed, "wrong": wrong}
    missed = [f"{len(ids)} rows {name}: {ids[:3]}" for name, ids in problems.items() if ids]
    return {"written": len(written), **{name: len(ids) for name, ids in problems.items()}, "missed": missed}


if __name__ == "__main__":
    sys.exit(main())

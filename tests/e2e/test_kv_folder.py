"""Blocks that are kept in a folder are found after a restart with the bits of computing; bad files cost only time."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.engine.front.metrics import PREFIX, Counter, Gauge
from jaxllm.exceptions import VLLMValidationError
from tests.e2e.test_kv_offloading import ARGUMENTS, make_jobs
from tests.e2e.tiny_engine import Job, bits, folder, run_together, tiny_llm
from tests.execution.test_block_folder import files_in, fill_disk, mutate

pytestmark = pytest.mark.engine


def run(case: str | Path, kept: Path, jobs: list[Job], **changes: Any) -> tuple[list[Any], list[int], int]:
    """Return what a new engine answers, the tokens that each request found, and the blocks that came back."""
    with tiny_llm(case, **(ARGUMENTS | {"kv_cache_folder": str(kept)} | changes)) as (llm, scheduler):
        outputs = run_together(llm, jobs)
        scheduler.check()
        num_loaded = scheduler.tiers.counts.num_disk_blocks
    return [bits(output) for output in outputs], [output.num_cached_tokens or 0 for output in outputs], num_loaded


@pytest.mark.parametrize("case", ["llama3_tied", "gpt_oss", "qwen3_next"])
def test_a_later_engine_finds_what_an_earlier_one_computed(case: str, tmp_path: Path) -> None:
    jobs = make_jobs()
    expected, _, _ = run(case, tmp_path, jobs)
    again, num_cached, num_loaded = run(case, tmp_path, jobs)
    assert again == expected
    assert num_loaded > 0
    assert min(num_cached) >= 112  # all but the last blocks of each prompt
    # Another engine's content is not found.
    _, num_cached, _ = run(case, tmp_path, jobs[:1], max_model_len=176)
    assert num_cached == [0]


def counts_of(llm: LLM) -> dict[tuple[str, ...], float]:
    """Return the values of metrics by their names and last labels."""
    metrics = [each for each in llm.get_metrics() if isinstance(each, Counter | Gauge)]
    return {(each.name.removeprefix(PREFIX), *list(each.labels.values())[2:]): each.value for each in metrics}


def test_metrics_tell_what_came_from_where(tmp_path: Path) -> None:
    jobs = make_jobs()
    run("llama3_tied", tmp_path, jobs)
    num_files = len(files_in(tmp_path))
    broken = files_in(tmp_path)[0]
    broken.write_bytes(b"")
    num_bytes = sum(path.stat().st_size for path in files_in(tmp_path))
    with tiny_llm("llama3_tied", **(ARGUMENTS | {"kv_cache_folder": str(tmp_path)})) as (llm, scheduler):
        counts = counts_of(llm)
        assert (counts["kv_tier_blocks", "disk"], counts["kv_tier_bytes", "disk"]) == (num_files, num_bytes)
        assert (counts["kv_tier_blocks", "host"], counts["kv_tier_bytes", "host"]) == (0, 0)
        outputs = [output for job in [*jobs, *jobs] for output in run_together(llm, [job])]
        counts, tiers = counts_of(llm), scheduler.tiers
        by_source = [counts["prompt_tokens_cached_by_source", source] for source in ("device", "host", "disk")]
        assert min(by_source) > 0
        num_cached, num_tokens = sum(output.num_cached_tokens or 0 for output in outputs), 2 * sum(map(len_of, jobs))
        assert sum(by_source) == counts["prompt_tokens_cached",] == num_cached
        assert counts["prefix_cache_hits",] == by_source[0]
        assert counts["external_prefix_cache_hits",] == by_source[1] + by_source[2]
        assert counts["external_prefix_cache_queries",] == num_tokens - by_source[0]
        assert [counts["kv_tier_fetched_blocks", tier] for tier in ("host", "disk")] == [
            tiers.counts.num_host_blocks,
            tiers.counts.num_disk_blocks,
        ]
        assert by_source[1:] == [16 * tiers.counts.num_host_blocks, 16 * tiers.counts.num_disk_blocks]
        assert (counts["kv_tier_fetches", "failed"], counts["kv_tier_broken_files",]) == (1, 1)
        assert counts["kv_tier_evicted_blocks", "host"] == 0
        head = num_bytes // (num_files - 1) - counts["kv_tier_bytes", "host"] // counts["kv_tier_blocks", "host"]
        assert 0 < head < 200  # what a file has besides a block


def len_of(job: Job) -> int:
    return len(job.prompt)


UNENDED = """
import sys
from pathlib import Path
from tests.e2e.test_kv_offloading import ARGUMENTS, make_jobs
from tests.e2e.tiny_engine import folder, run_together
from jaxllm import LLM
llm = LLM(
    str(folder("llama3_tied")), dtype="float32", skip_tokenizer_init=True, block_size=16, enforce_eager=True,
    kv_cache_folder=sys.argv[1], **ARGUMENTS,
)
run_together(llm, make_jobs()[:1])
"""


def test_a_program_that_ends_without_a_shutdown_leaves_its_blocks(tmp_path: Path, repository: Path) -> None:
    command = [sys.executable, "-c", UNENDED, str(tmp_path)]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr[-2000:]
    assert len(files_in(tmp_path)) >= 8  # the whole blocks of a prompt of 140 tokens


def test_changed_files_change_no_token(tmp_path: Path) -> None:
    jobs, rng = make_jobs(), random.Random(3)
    expected, _, _ = run("llama3_tied", tmp_path, jobs)
    for share in (0.3, 1.0):
        for path in files_in(tmp_path):
            if rng.random() < share:
                mutate(path, rng)
        again, _, _ = run("llama3_tied", tmp_path, jobs)
        assert again == expected


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_full_disk_is_served_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    jobs = make_jobs()
    with monkeypatch.context() as patch:
        fill_disk(patch, where)
        full, _, _ = run("llama3_tied", tmp_path / "full", jobs)
    assert files_in(tmp_path / "full") == []
    assert full == run("llama3_tied", tmp_path / "other", jobs)[0]


def test_what_is_forgotten_is_not_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, threads, unlink = make_jobs(), set[str](), Path.unlink

    def watched(path: Path) -> None:
        threads.add(threading.current_thread().name)
        unlink(path)

    run("llama3_tied", tmp_path, jobs)
    with tiny_llm("llama3_tied", kv_cache_folder=str(tmp_path), **ARGUMENTS) as (llm, _):
        monkeypatch.setattr(Path, "unlink", watched)
        assert llm.reset_prefix_cache(reset_connector=True)
    assert files_in(tmp_path) == []
    assert all(name.startswith("jaxllm-write") for name in threads), "files are removed in the thread of the steps"
    assert threads


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_keeps_files_unless_the_weights_change(tmp_path: Path, level: int) -> None:
    model, kept = shutil.copytree(folder("llama3_tied"), tmp_path / "model"), tmp_path / "kept"
    jobs = make_jobs()
    expected, _, _ = run(model, kept, jobs)
    with tiny_llm(model, **(ARGUMENTS | {"kv_cache_folder": str(kept)})) as (llm, scheduler):
        llm.sleep(level)
        assert files_in(kept)
        llm.wake_up()
        again = run_together(llm, jobs)
        assert list(map(bits, again)) == expected
        num_blocks = scheduler.tiers.counts.num_disk_blocks
        assert num_blocks > 0
        llm.sleep(level)
        os.utime(model / "model.safetensors")
        before = files_in(kept)
        llm.wake_up()
        outputs = [run_together(llm, [job])[0] for job in jobs]
        assert outputs[0].num_cached_tokens == 0
        assert list(map(bits, outputs)) == expected
        assert scheduler.tiers.counts.num_disk_blocks == num_blocks
    assert files_in(kept) == before


SHARING = """
import json
import sys
import time
from pathlib import Path
from jaxllm.execution.tiers import folder
from tests.e2e.test_kv_offloading import ARGUMENTS, make_jobs
from tests.e2e.tiny_engine import Job, bits, run_together, tiny_llm
from tests.execution.test_block_folder import files_in
folder._SCAN_SECONDS = 0.0  # it looks for the other's files whenever it misses one
shared, number = Path(sys.argv[1]), int(sys.argv[2])

def meet(name):
    (shared / f"{name}-{number}").touch()
    while not (shared / f"{name}-{1 - number}").exists():
        time.sleep(0.01)

jobs = make_jobs()
halves = [jobs[:4], jobs[4:]]
fillers = [Job([first] * 150, jobs[0].params) for first in range(10 * number + 3, 10 * number + 7)]
blocks = {tuple(job.prompt[:end]) for job in jobs for end in range(16, len(job.prompt) + 1, 16)}
with tiny_llm("llama3_tied", **(ARGUMENTS | {"kv_cache_folder": str(shared / "kept")})) as (llm, scheduler):
    run_together(llm, halves[number] + fillers)
    while len(files_in(shared)) < len(blocks):  # the fillers take all blocks, so what these had is written
        time.sleep(0.01)
    scheduler._files.scan()
    meet("begun")
    run_together(llm, halves[1 - number])
    num_disk_blocks = scheduler.tiers.counts.num_disk_blocks
    for _ in range(3):  # both read and write the same blocks at the same time
        outputs = run_together(llm, jobs)
    meet("half")
    assert llm.reset_prefix_cache(reset_connector=number == 0)
    meet("reset")
    outputs += run_together(llm, jobs if number else jobs[::-1])[:: 1 if number else -1]
print(json.dumps([num_disk_blocks, *(repr(bits(output)) for output in outputs)]))
"""


def test_two_engines_share_a_folder_at_once(tmp_path: Path, repository: Path) -> None:
    with tiny_llm("llama3_tied", **ARGUMENTS) as (llm, _):
        expected = [repr(bits(output)) for output in run_together(llm, make_jobs())]
    commands = [[sys.executable, "-c", SHARING, str(tmp_path), str(number)] for number in range(2)]
    both = [subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in both:
        printed, _ = process.communicate()
        assert process.returncode == 0
        num_disk_blocks, *outputs = json.loads(printed.splitlines()[-1])
        assert outputs == expected * 2
        assert num_disk_blocks > 0, "it has read nothing of what the other wrote"


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VLLMValidationError, match="kv_cache_folder"):
        run("llama3_tied", tmp_path / "file", [])
    with pytest.raises(VLLMValidationError, match="set kv_offloading_size too"):
        run("llama3_tied", tmp_path, [], kv_offloading_size=None)

"""Blocks that are kept in a folder are found after a restart with the bits of computing; bad files cost only time."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.engine.front.metrics import PREFIX, Counter, Gauge
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.tiers import folder as folder_module
from tests.e2e.test_kv_offloading import ARGUMENTS, make_jobs
from tests.e2e.tiny_engine import Job, bits, run_together, tiny_llm
from tests.execution.test_block_folder import files_in, mutate

pytestmark = pytest.mark.engine


def run(case: str, folder: Path, jobs: list[Job], **changes: Any) -> tuple[list[Any], list[int], int]:
    """Return what a new engine answers, the tokens that each request found, and the blocks that came back."""
    with tiny_llm(case, **(ARGUMENTS | {"kv_cache_folder": str(folder)} | changes)) as (llm, scheduler):
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


def test_a_full_disk_is_served_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = make_jobs()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module.os, "replace", refuse)
    full, _, _ = run("llama3_tied", tmp_path / "full", jobs)
    monkeypatch.undo()
    assert files_in(tmp_path / "full") == []
    assert full == run("llama3_tied", tmp_path / "other", jobs)[0]


def test_what_is_forgotten_is_not_in_files(tmp_path: Path) -> None:
    jobs = make_jobs()
    run("llama3_tied", tmp_path, jobs)
    with tiny_llm("llama3_tied", kv_cache_folder=str(tmp_path), **ARGUMENTS) as (llm, _):
        assert llm.reset_prefix_cache(reset_connector=True)
    assert files_in(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VLLMValidationError, match="kv_cache_folder"):
        run("llama3_tied", tmp_path / "file", [])
    with pytest.raises(VLLMValidationError, match="set kv_offloading_size too"):
        run("llama3_tied", tmp_path, [], kv_offloading_size=None)

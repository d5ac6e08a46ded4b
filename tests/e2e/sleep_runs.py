"""Let models on two virtual devices sleep, for test_sleep.py: a process of its own, because JAX counts devices once."""

from __future__ import annotations

import jax

from jaxllm.execution.model_runner import ModelRunner
from tests.e2e.test_sleep import LEVELS, RELEASE, SETTINGS, check_sleeps, release_to_host
from tests.e2e.tiny_engine import tiny_llm

if __name__ == "__main__":
    assert len(jax.devices()) == 2
    for case in ("llama3_tied", "qwen3_next"):
        with tiny_llm(case, **SETTINGS, tensor_parallel_size=2) as (llm, _):
            ModelRunner.release_device = RELEASE
            check_sleeps(llm, 2, LEVELS, [None])
            ModelRunner.release_device = release_to_host  # pyright: ignore[reportAttributeAccessIssue]
            check_sleeps(llm, 2, (1,), [["weights"], ["kv_cache"]])

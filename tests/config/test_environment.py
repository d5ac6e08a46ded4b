"""The environment settles how the engine uses a CPU."""

from __future__ import annotations

import os

import pytest

from jaxllm.config.environment import limit_cpu
from jaxllm.exceptions import VLLMValidationError
from pallas_kernels.native.processor import AVX2, AVX512, current, restricted, x86


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (None, "--some", "--some"),
        ("avx2", "", "--xla_cpu_max_isa=AVX2"),
        ("plain", "--some", "--some --xla_cpu_max_isa=SSE4_2"),
        ("avx2", "--xla_cpu_max_isa=AVX", "--xla_cpu_max_isa=AVX"),
        ("avx512", "--some", "--some"),
    ],
)
def test_xlas_own_code_keeps_to_the_instruction_set(
    name: str | None, before: str, after: str, monkeypatch: pytest.MonkeyPatch
):
    processor = restricted(x86("x86_64", "", dict.fromkeys(AVX2 + AVX512, True)), name)
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: processor)
    monkeypatch.setenv("XLA_FLAGS", before)
    monkeypatch.setenv("JAXLLM_CPU", name or "")
    limit_cpu()
    assert os.environ["XLA_FLAGS"] == after


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pallas_kernels.native.processor.current", current.__wrapped__)
    monkeypatch.setenv("JAXLLM_CPU", "mmx")
    with pytest.raises(VLLMValidationError, match="JAXLLM_CPU=mmx is no instruction set: choose one of") as caught:
        limit_cpu()
    assert (caught.value.parameter, caught.value.value) == ("JAXLLM_CPU", "mmx")


@pytest.mark.parametrize(
    ("cores", "setting", "expected"), [(2, None, "2"), (2, "8", "8"), (4, None, None)], ids=["quota", "own", "no quota"]
)
def test_xla_has_as_many_threads_as_a_quota_buys(
    cores: int, setting: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pallas_kernels.native.cores.num_allowed", lambda: 4)
    monkeypatch.setattr("pallas_kernels.native.cores.num_cores", lambda: cores)
    monkeypatch.setenv("NPROC", setting or "")
    if setting is None:
        monkeypatch.delenv("NPROC")
    limit_cpu()
    assert os.environ.get("NPROC") == expected

"""The dtype that the model computes in follows from checkpoint, device and argument."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import TensorInfo, dominant_dtype
from jaxllm.loading.dtype import multiplies_bfloat16_fast, resolve_dtype
from pallas_kernels.native.processor import AVX2, AVX512, Processor, aarch64, x86


def checkpoint(dtype: str = "bfloat16", *, gguf: bool = False) -> Any:
    return SimpleNamespace(dtype=dtype, is_gguf=gguf)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_what_is_asked_for_is_taken(requested: str, expected: str):
    assert resolve_dtype(requested, checkpoint(gguf=True), "gpu") == expected


@pytest.mark.parametrize(("requested", "stored"), [("half", "bfloat16"), ("float16", "float32"), ("auto", "float16")])
def test_float16_on_a_cpu_is_computed_as_float32(caplog: pytest.LogCaptureFixture, requested: str, stored: str):
    with caplog.at_level("WARNING", "jaxllm"):
        assert resolve_dtype(requested, checkpoint(stored), "cpu") == "float32"
    assert "float16 is computed as float32 on a CPU" in caplog.text


@pytest.mark.parametrize("requested", ["float64", "int8", "fp8", ""])
def test_others_are_refused_by_name(requested: str):
    with pytest.raises(VLLMValidationError, match=f"dtype='{requested}'") as error:
        resolve_dtype(requested, checkpoint(), "cpu")
    assert (error.value.parameter, error.value.value) == ("dtype", requested)


def test_auto_is_the_checkpoints():
    assert resolve_dtype("auto", checkpoint("float32"), "cpu") == "float32"
    with pytest.raises(VLLMValidationError, match="float8"):
        resolve_dtype("auto", checkpoint("float8_e4m3fn"), "cpu")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_no_accelerator_s_kernels_have_float16(caplog: pytest.LogCaptureFixture, platform: str):
    with caplog.at_level("WARNING", "jaxllm"):
        assert resolve_dtype("auto", checkpoint("float16"), platform) == "bfloat16"
    assert f"float16 is computed as bfloat16, as no kernels for a {platform.upper()}" in caplog.text


@pytest.mark.parametrize(
    ("processor", "fast"),
    [
        (x86("x86_64", "", dict.fromkeys((*AVX2, *AVX512, "avx512bf16"), True)), True),
        (x86("x86_64", "", dict.fromkeys((*AVX2, *AVX512), True)), False),
        (aarch64("aarch64", "", {"bf16": True}), True),
        (aarch64("aarch64", "", {}), False),
    ],
)
def test_bfloat16_on_cpu_needs_its_instructions(monkeypatch: pytest.MonkeyPatch, processor: Processor, fast: bool):
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: processor)
    assert multiplies_bfloat16_fast("cpu") is fast


def test_bfloat16_elsewhere():
    assert multiplies_bfloat16_fast("gpu")
    assert multiplies_bfloat16_fast("tpu")


def test_auto_for_gguf():
    expected = "bfloat16" if multiplies_bfloat16_fast("cpu") else "float32"
    for stored in ("float32", "float16", "bfloat16"):
        assert resolve_dtype("auto", checkpoint(stored, gguf=True), "cpu") == expected
    assert resolve_dtype("auto", checkpoint("float32", gguf=True), "gpu") == "bfloat16"


def test_the_dominant_dtype():
    tensors = [TensorInfo((10, 10), "bfloat16"), TensorInfo((50,), "float32"), TensorInfo((1000,), "int8")]
    assert dominant_dtype(tensors, {}) == "bfloat16"
    assert dominant_dtype([], {"torch_dtype": "float16"}) == "float16"
    assert dominant_dtype([], {"text_config": {"dtype": "bfloat16"}}) == "bfloat16"
    assert dominant_dtype([], {}) == "float32"
    assert dominant_dtype([TensorInfo((2,), "float64")], {}) == "float32"

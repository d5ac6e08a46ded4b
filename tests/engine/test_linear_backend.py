"""linear_backend rounds what quantized weights multiply, or says why it would round nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm import EngineArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.model import checked_draft, checked_model
from jaxllm.resolve.resolve_ops import Picker, _choose_matmuls
from pallas_kernels.linear import LinearShape
from pallas_kernels.native import processor
from pallas_kernels.weights import WeightFormat
from tests.loading.gguf_vision_files import text_file
from tests.models.tiny import folder

WIDE = LinearShape(64, 64, jnp.float32, jnp.float32, WeightFormat(8, scale_dtype="float32"))
"""A matmul that is large enough."""


@pytest.fixture(autouse=True)
def _vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    current = processor.current()
    if current.name == "plain":
        pytest.skip("no kernels")
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: replace(current, has_int8_dot=True))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny models have a matmul that is large enough."""
    monkeypatch.setattr("jaxllm.resolve.resolve_ops.linear_shapes", lambda _: [WIDE])


def linear(case: str = "llama3_tied", **arguments: Any) -> Any:
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "linear_backend": "cpu_int8"}
    config = EngineArgs(str(folder(case)), **(defaults | arguments)).create_engine_config()
    return checked_model(config)[0].ops.linear


@pytest.mark.usefixtures("wide")
def test_experts_stay_exact(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert linear("qwen3_moe", quantization="int8").implementation == "cpu_int8"
    assert "experts" in caplog.text


def test_a_draft_model_need_not_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's shapes are asked for last."""
    shapes = [[WIDE], []]
    monkeypatch.setattr("jaxllm.resolve.resolve_ops.linear_shapes", lambda _: shapes.pop(0))
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "linear_backend": "cpu_int8",
        "quantization": "int8",
    }
    speculation: Any = {"model": str(folder("llama3_tied")), "num_speculative_tokens": 2, "method": "draft_model"}
    config = EngineArgs(str(folder("llama3_tied")), speculative_config=speculation, **arguments).create_engine_config()
    assert not shapes
    model, specs = checked_model(config)
    assert model.ops.linear.implementation == "cpu_int8"
    assert config.draft is not None
    assert checked_draft(config, config.draft, specs)[0].ops.linear.implementation == "cpu_int8"


@pytest.mark.usefixtures("wide")
def test_is_chosen_for_quantized_weights(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert linear(quantization="int8").implementation == "cpu_int8"
    assert not caplog.records
    assert linear(quantization="int8", linear_backend="auto").implementation == "cpu"


@pytest.mark.parametrize(
    ("arguments", "has_bfloat16", "expected"),
    [
        ({}, False, "cpu_int8"),
        ({"dtype": "float32"}, False, "cpu"),
        ({}, True, "cpu"),
        ({"attention_config": {"backend": "xla"}}, False, "xla"),
    ],
)
def test_auto_rounds_for_gguf_where_nothing_is_named(
    arguments: dict[str, Any], *, has_bfloat16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = replace(processor.current(), has_bfloat16_dot=has_bfloat16)
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: present)
    shapes = [WIDE]
    monkeypatch.setattr("jaxllm.resolve.resolve_ops.linear_shapes", lambda _: shapes)

    def chosen() -> str:
        config = EngineArgs(str(text_file("gemma3")), skip_tokenizer_init=True, **arguments).create_engine_config()
        return checked_model(config)[0].ops.linear.implementation

    assert chosen() == expected
    shapes = [WIDE._replace(format=None)]
    assert chosen() == ("xla" if expected == "xla" else "cpu")


def test_says_what_stays_exact(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    shapes = [
        LinearShape(64, 64, jnp.float32, jnp.float32, form)
        for form in (WeightFormat(4, 32), WeightFormat(4, 64, "nf4"))
    ]
    monkeypatch.setattr("jaxllm.resolve.resolve_ops.linear_shapes", lambda _: shapes)
    with caplog.at_level(logging.WARNING):
        assert linear(quantization="int8").implementation == "cpu_int8"
    assert "nf4" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "no matmul's weights are quantized"),
        ({"quantization": "fp8"}, "e4m3"),
        ({"quantization": "int8", "attention_config": {"backend": "xla"}}, "one CPU device with its own kernels"),
        ({"quantization": "int8", "tensor_parallel_size": 2}, "one CPU device with its own kernels"),
    ],
    ids=str,
)
def test_refuses_to_round_nothing(arguments: dict[str, Any], reason: str) -> None:
    if jax.device_count() < arguments.get("tensor_parallel_size", 1):
        pytest.skip("one device")
    with pytest.raises(VLLMValidationError, match=reason) as caught:
        linear(**arguments)
    assert (caught.value.parameter, caught.value.value) == ("linear_backend", "cpu_int8")


@pytest.mark.parametrize(
    ("quantization", "platform", "architecture", "reason"),
    [
        ("fp8", "cpu", None, "for GPUs, not a cpu"),
        ("fp8", "gpu", "8.6", "8.9 or later"),
        ("int8", "gpu", "9.0", "not float8"),
        ("fp8", "gpu", "8.9", None),
    ],
)
def test_float8_needs_its_weights_and_a_gpu(
    quantization: str, platform: str, architecture: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineArgs(
        str(folder("llama3_tied")), skip_tokenizer_init=True, dtype="float32", quantization=quantization
    ).create_engine_config()
    specs = checked_model(config)[0].specs
    device = {"architecture": architecture, "num_cores": None}
    monkeypatch.setattr("jaxllm.resolve.resolve_ops.device_facts", lambda _: device)
    picker = Picker(config.mesh, platform, {})
    if reason is None:
        assert _choose_matmuls(specs, picker, "gpu_fp8").linear.implementation == "gpu_fp8"
        return
    with pytest.raises(VLLMValidationError, match=reason) as caught:
        _choose_matmuls(specs, picker, "gpu_fp8")
    assert (caught.value.parameter, caught.value.value) == ("linear_backend", "gpu_fp8")

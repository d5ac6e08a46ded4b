"""The compiler gets these options; tests/e2e/test_batch_invariance.py shows that they are enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import pytest

from jaxllm.execution import options as module
from jaxllm.execution.options import (
    INVARIANT_MATMULS,
    YNN_OPERATIONS,
    compiler_options,
    single_row_pays,
    widens_rounded_weights,
)
from jaxllm.models.weights import Ops
from pallas_kernels.grouped_matmul import GroupedMatmul, MatmulShape
from pallas_kernels.linear import Linear, LinearShape
from pallas_kernels.linear.cases import RARE
from pallas_kernels.native.processor import AVX2, AVX512, x86
from pallas_kernels.weights import INT8, WeightFormat


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cpu_rounds_to_the_dtype_in_any_case(dtype: str) -> None:
    for batch_invariant in (False, True):
        options = compiler_options("cpu", dtype, batch_invariant)
        assert options["xla_allow_excess_precision"] is False
        assert (YNN_OPERATIONS in options) is batch_invariant


@pytest.mark.parametrize("features", [AVX2 + AVX512, AVX2, ()])
def test_the_librarys_matmuls_are_used_where_rows_do_not_depend_on_each_other(
    features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = x86("x86_64", "", dict.fromkeys(features, True))
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: processor)
    flags = {
        dtype: compiler_options("cpu", dtype, batch_invariant=True)[YNN_OPERATIONS] for dtype in ("bfloat16", "float32")
    }
    assert flags == {"bfloat16": INVARIANT_MATMULS, "float32": "" if processor.name == "avx512" else INVARIANT_MATMULS}


def test_weights_of_a_gpu_and_of_a_tpu_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for quantized, matmuls in ((False, {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}), (True, {})):
        options = compiler_options("gpu", "bfloat16", batch_invariant=False, quantized=quantized)
        assert options == {
            "xla_gpu_enable_dynamic_slice_fusion": False,
            "xla_gpu_dot_merger_threshold_mb": 0,
            "xla_disable_hlo_passes": "rematerialization",
        } | matmuls  # fmt: skip
    assert compiler_options("tpu", "bfloat16", batch_invariant=False) == {
        "xla_tpu_control_large_2nd_minor_layout_for_x16": False
    }


def gpus(architecture: str, *hosts: int) -> list[Any]:
    return [SimpleNamespace(compute_capability=architecture, process_index=host) for host in hosts]


@pytest.mark.parametrize(
    ("devices", "added"),
    [
        (gpus("9.0", 0), None),
        (gpus("8.9", 0), "WHILE,CONDITIONAL"),
        (gpus("9.0", 0, 0), "COLLECTIVES"),
        (gpus("12.0", 0, 0), "WHILE,CONDITIONAL,COLLECTIVES"),
        (gpus("9.0", 0, 1), None),
    ],
)
def test_graphs_hold_loops_except_on_hopper_and_collectives_of_one_host(
    devices: list[Any], added: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    options = compiler_options("gpu", "bfloat16", batch_invariant=False, devices=devices)
    graphs = options.get("xla_gpu_enable_command_buffer")
    assert graphs == (added and f"FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,{added}")
    assert ("xla_gpu_experimental_use_collective_kernels" in options) is ("COLLECTIVES" in (added or ""))


def test_flags_of_the_user_count(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"xla_gpu_enable_command_buffer": "FUSION", "xla_disable_hlo_passes": "algsimp"}
    for name, value in flags.items():
        monkeypatch.setenv("XLA_FLAGS", f"--{name}={value}")
        options = compiler_options("gpu", "bfloat16", batch_invariant=False, devices=gpus("8.9", 0))
        assert flags.keys() & options == flags.keys() - {name}


@pytest.mark.parametrize(("platform", "dtype"), [("gpu", "bfloat16"), ("tpu", "float32"), ("cpu", "float16")])
def test_unproven_invariance_is_refused(platform: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"{dtype} on {platform}"):
        compiler_options(platform, dtype, batch_invariant=True)


@pytest.mark.parametrize(
    ("platform", "linear", "grouped", "formats", "has_experts", "pays"),
    [
        ("gpu", "xla", "xla", [INT8], False, True),
        ("gpu", "gpu", "xla", [INT8], False, False),
        ("gpu", "gpu_mma", "xla", [INT8], False, False),
        ("gpu", "gpu_mma", "xla", [INT8, RARE["nf4"]], False, True),
        ("gpu", "xla", "xla", [None], False, False),
        ("gpu", "xla", "xla", [None], True, True),
        ("gpu", "xla", "gpu", [None], True, False),
        ("tpu", "xla", "xla", [INT8], True, False),
        ("cpu", "xla", "xla", [INT8], True, False),
    ],
)
def test_which_models_have_a_program_for_a_single_row(
    platform: str,
    linear: str,
    grouped: str,
    formats: list[WeightFormat | None],
    has_experts: bool,
    pays: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [LinearShape(64, 64, jnp.bfloat16, jnp.bfloat16, form) for form in formats]
    experts = [MatmulShape(4, 64, 64, jnp.bfloat16, None, jnp.bfloat16)] * has_experts
    monkeypatch.setattr(module, "linear_shapes", lambda _: shapes)
    monkeypatch.setattr(module, "grouped_shapes", lambda _: experts)
    ops = Ops(Linear(linear), GroupedMatmul(grouped))
    assert single_row_pays(platform, cast(Any, SimpleNamespace(specs=None, ops=ops))) is pays


@pytest.mark.parametrize(
    ("quantization", "linear", "dtype", "widens"),
    [
        ("int8", "gpu_mma", "bfloat16", False),
        ("int8", "gpu_mma", "float16", True),
        ("int8", "xla", "bfloat16", True),
        (None, "gpu_mma", "float16", False),
    ],
)
def test_weights_that_the_kernel_refuses_are_widened(
    quantization: str | None, linear: str, dtype: str, widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = LinearShape(64, 64, jnp.dtype(dtype), jnp.dtype(dtype), INT8)
    monkeypatch.setattr(module, "linear_shapes", lambda _: [shape])
    monkeypatch.setattr(module, "grouped_shapes", lambda _: [])
    specs, ops = SimpleNamespace(quantization=quantization), Ops(Linear(linear), GroupedMatmul())
    assert widens_rounded_weights(cast(Any, SimpleNamespace(specs=specs, ops=ops))) is widens

"""Compiler options for XLA, per platform, and the JAX settings that the engine pins around its own work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm.config.environment import sets_xla_flag
from jaxllm.execution.kv_pool import KVGroup
from jaxllm.execution.mesh import Device
from jaxllm.models import LayerLoop
from jaxllm.models.model import Model
from jaxllm.models.shapes import grouped_shapes, linear_shapes
from pallas_kernels.targets import hopper_refusal

# The operations that XLA:CPU hands to its YNNPACK library; by default matmuls, elementwise chains and reductions.
YNN_OPERATIONS = "xla_cpu_experimental_ynn_fusion_type"
INVARIANT_MATMULS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_INVARIANT_DTYPES = ("bfloat16", "float32")


_TPU_OPTIONS: dict[str, Any] = {
    # Without it a TPU7x brings all 16-bit weights into tiles of twice as many rows, in memory and in each step.
    "xla_tpu_control_large_2nd_minor_layout_for_x16": False,
}
_GPU_OPTIONS: dict[str, Any] = {
    # With it a kernel that reads a part of the packed inputs is fused with that slice, and is no node of a CUDA graph.
    "xla_gpu_enable_dynamic_slice_fusion": False,
    # With it small matmuls of the same rows become one, and each step puts their weights side by side in memory.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
_PASSES_OPTIONS: dict[str, Any] = {
    # This pass takes each update of the pool in place for a second pool, which a device does not hold. Then it computes
    # small fusions again in each layer, in more launches, and scratch stays as it is.
    "xla_disable_hlo_passes": "rematerialization",
}
_GRAPH_COMMANDS: tuple[str, ...] = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION")
"""What XLA puts into CUDA graphs by default."""
_GRAPH_LOOPS = ("WHILE", "CONDITIONAL")
_GRAPH_OPTION = "xla_gpu_enable_command_buffer"
_SUMS_OPTION = "xla_gpu_experimental_use_collective_kernels"
# cuBLAS fuses the addition after a matmul, and chooses its own algorithm. XLA's own matmuls take one more kernel for
# it, and would be tuned at each first start: bits would depend on the winner. Neither has been measured on a device
# (scripts/bench.py engine --autotuned).
CUBLAS_OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


def compiler_options(
    platform: str, dtype: DTypeLike, batch_invariant: bool, *, quantized: bool = False, devices: Sequence[Device] = ()
) -> dict[str, Any]:
    """Return the compiler options of a step; `quantized` is what `widens_rounded_weights` returns.

    `devices` are those of the mesh; options of GPUs depend on them. Of what graphs hold and which passes run, XLA_FLAGS
    takes precedence.

    Raises ValueError where a row cannot be kept from depending on the others; `resolve` refuses such configurations.
    """
    name = jnp.dtype(dtype).name
    if batch_invariant and (platform != "cpu" or name not in _INVARIANT_DTYPES):
        raise ValueError(f"batch invariance is not assured in {name} on {platform}")
    if platform == "gpu":
        # cuBLAS needs such weights in another dtype first, in memory. That pays where own kernels take few rows.
        chosen = _GPU_OPTIONS | ({} if quantized else CUBLAS_OPTIONS)
        may_be_set = _PASSES_OPTIONS | _graph_options(devices)
        return chosen | {name: value for name, value in may_be_set.items() if not sets_xla_flag(name)}
    if platform == "tpu":
        return _TPU_OPTIONS
    # Otherwise XLA keeps some bfloat16 intermediates in float32, and a row's value depends on its bucket.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if batch_invariant:
        options[YNN_OPERATIONS] = _invariant_operations(name)
    return options


def widens_rounded_weights(model: Model) -> bool:
    """Return whether plain XLA multiplies by weights that were rounded when they were loaded, and widens them first."""
    if model.specs.quantization is None:
        return False
    ops, has_experts = model.ops, bool(grouped_shapes(model.specs))
    has_plain_experts = has_experts and ops.grouped_matmul.implementation == "xla"
    return has_plain_experts or ops.linear.implementation == "xla" or _refuses_weights(model)


def _graph_options(devices: Sequence[Device]) -> dict[str, Any]:
    """Return what becomes part of CUDA graphs on some GPUs beside what does by default.

    - Loops and branches, which the host would run otherwise, one pass at a time. Not on Hopper, where own kernels leave
      few, until a device has run such graphs.
    - Collectives of the GPUs of one host. Hosts might launch their graphs in different orders. Small sums are then made
      by one kernel that reads the memory of the other GPUs.
    """
    commands, options = [*_GRAPH_COMMANDS], {}
    architecture = getattr(devices[0], "compute_capability", None) if devices else None
    if architecture is not None and hopper_refusal(architecture) is not None:
        commands += _GRAPH_LOOPS
    if len(devices) > 1 and len({device.process_index for device in devices}) == 1:
        commands.append("COLLECTIVES")
        options[_SUMS_OPTION] = "COLLECTIVE_KERNEL_ALL_REDUCE"
    if len(commands) > len(_GRAPH_COMMANDS):
        options[_GRAPH_OPTION] = ",".join(commands)
    return options


def _invariant_operations(dtype: str) -> str:
    """Return the operations of the library that give a row the same bits beside any number of others.

    Reductions do not: few rows are summed in another order.
    """
    return INVARIANT_MATMULS if library_is_invariant(dtype) else ""


def library_is_invariant(dtype: str) -> bool:
    """Return whether the library's matmuls give a row the same bits beside any number of others.

    They are much faster than XLA's own, whose results depend on the number of rows on a processor without AVX-512. With
    AVX-512 the library multiplies float32 rows in another order from 64 rows on.
    """
    from pallas_kernels.native import processor

    return dtype == "bfloat16" or not processor.current().has_avx512


def min_rows(platform: str, dtype: DTypeLike) -> int:
    """Return the rows of the smallest step: with fewer, matmuls round differently, or are no faster."""
    return 4 if platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16 else 8


def single_row_pays(platform: str, model: Model) -> bool:
    """Return whether the step of one request's next token should have a program of its own, without padding.

    It should on a GPU where plain XLA multiplies by quantized weights or experts: it adds up products for each row.
    """
    if platform != "gpu":
        return False
    quantized = [shape for shape in linear_shapes(model.specs) if shape.format is not None]
    has_plain_weights = bool(quantized) and (model.ops.linear.platform is None or _refuses_weights(model))
    has_plain_experts = bool(grouped_shapes(model.specs)) and model.ops.grouped_matmul.platform is None
    return has_plain_weights or has_plain_experts


def _refuses_weights(model: Model) -> bool:
    """Return whether the op of dense layers leaves some of their quantized weights to plain XLA."""
    quantized = (shape for shape in linear_shapes(model.specs) if shape.format is not None)
    return any(model.ops.linear.refusal(shape) for shape in quantized)


def layer_loop(platform: str, groups: Sequence[KVGroup], num_devices: int) -> LayerLoop:
    """Return how steps go through the layers.

    Several CPU devices stand in for TPUs, and interpreted kernels for their platform. Matmuls use the CPU's own kernel
    where attention does, or nothing attends.
    """
    attentions = [group.attention for group in groups]
    implementations = {attention.implementation for attention in attentions}
    if platform == "gpu" or implementations & {"gpu", "gpu_mma"}:
        return LayerLoop.UNROLL
    if platform != "cpu" or any(attention.interpret for attention in attentions) or num_devices > 1:
        return LayerLoop.SCAN
    return LayerLoop.IN_PLACE if implementations <= {"cpu", "none"} else LayerLoop.SWITCH


def compiling_for(device: Any) -> AbstractContextManager[Any]:
    """Make a GPU that is not there the one that kernels are lowered for.

    Mosaic GPU asks JAX's default device for its compute capability, and takes 9.0 if it has none.
    """
    is_there = jax.local_devices()[0].platform == "gpu"
    return jax.default_device(device) if device.platform == "gpu" and not is_there else nullcontext()


_PINNED: Mapping[str, Any] = {
    "disable_jit": False,
    "enable_x64": False,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "threefry_partitionable": True,
    "transfer_guard": "allow",
    "debug_infs": False,
    "debug_nans": False,
}
"""Values by the name of JAX's context manager, which is the setting's without `jax_`."""


@contextmanager
def tracing() -> Iterator[None]:
    """Pin the settings that a trace, or an operation outside a program, depends on; this takes some 20 microseconds."""
    with ExitStack() as stack:
        for name, value in _PINNED.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


_PINNED_RUNNING: Mapping[str, Any] = {
    "disable_jit": False,
    "transfer_guard_host_to_device": "allow",
    "transfer_guard_device_to_host": "allow",
    "debug_infs": False,
    "debug_nans": False,
}


@contextmanager
def running() -> Iterator[None]:
    """Pin the settings that running a compiled program and reading its outputs depend on.

    Inputs are host arrays, and rows that nobody reads hold garbage. Settings that are right already cost nothing.
    """
    with ExitStack() as stack:
        for name, value in _PINNED_RUNNING.items():
            if getattr(jax.config, f"jax_{name}") not in (value, None):
                stack.enter_context(getattr(jax, name)(value))
        yield


def counts(name: str) -> bool:
    """Return whether the user's value of a setting, such as jax_enable_x64, can change a compiled program."""
    return "cache" not in name and not name.removeprefix("jax_").startswith(tuple(_PINNED))

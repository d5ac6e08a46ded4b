"""There are several ways of running the op; this says what each can do, and which one a platform gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jax import Array

from .shape import MatmulShape


class Implementation(NamedTuple):
    """One way of running the op."""

    load: Callable[[str | None], Callable[..., Array]]
    """Import the function for an architecture; it has the signature of `GroupedMatmul.__call__`, with `out_dtype`
    and `interpret`, and gets arrays that fit each other."""
    platform: str | None
    """The platform where it runs, or None for all. A CPU interprets what belongs elsewhere, slowly."""
    row_alignment: Callable[[int, int], int]
    """A function that returns at multiples of what row groups begin, for so many choices of so many experts."""
    refusal: Callable[[MatmulShape], str | None] = lambda _: None
    """A function that says why it cannot run a matmul, or None if it can."""
    prepare: Callable[[MatmulShape, Path | None], None] = lambda _shape, _folder: None
    """See `GroupedMatmul.prepare`."""
    device_refusal: Callable[[str | None], str | None] = lambda _: None
    """A function that says why it cannot run on a device of its platform, by the architecture, or None if it can."""


def _load_xla(_: str | None) -> Callable[..., Array]:
    from .xla import xla_grouped_matmul

    return xla_grouped_matmul


def _load_cpu(_: str | None) -> Callable[..., Array]:
    from .cpu import cpu_grouped_matmul

    return cpu_grouped_matmul


def _cpu_row_alignment(_num_rows: int, _num_experts: int) -> int:
    from .cpu import ROW_ALIGNMENT

    return ROW_ALIGNMENT


def _refuse_on_cpu(shape: MatmulShape) -> str | None:
    from .cpu import cpu_refusal

    return cpu_refusal(shape)


def _prepare_cpu(shape: MatmulShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


def _load_tpu(_: str | None) -> Callable[..., Array]:
    from .tpu import tpu_grouped_matmul

    return tpu_grouped_matmul


def _refuse_on_tpu(shape: MatmulShape) -> str | None:
    from .tpu.sizes import refusal

    return refusal(shape)


def _load_gpu(_: str | None) -> Callable[..., Array]:
    from .gpu import gpu_grouped_matmul

    return gpu_grouped_matmul


def _refuse_on_gpu(shape: MatmulShape) -> str | None:
    from .gpu.sizes import refusal

    return refusal(shape)


def _refuse_gpu(architecture: str | None) -> str | None:
    if architecture is not None and architecture.startswith("9."):
        return None
    return f"the kernel is for NVIDIA's Hopper (compute capability 9.0), and this GPU is {architecture or 'another'}"


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None, lambda _num_rows, _num_experts: 1),
    "cpu": Implementation(_load_cpu, "cpu", _cpu_row_alignment, _refuse_on_cpu, _prepare_cpu),
    # However many rows there are: a kernel takes more at a time where an expert has more.
    "tpu": Implementation(_load_tpu, "tpu", lambda _num_rows, _num_experts: 16, _refuse_on_tpu),
    "gpu": Implementation(
        _load_gpu, "gpu", lambda _num_rows, _num_experts: 16, _refuse_on_gpu, device_refusal=_refuse_gpu
    ),
}

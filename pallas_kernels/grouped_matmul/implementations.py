"""The implementations of the op: what each can run, and on which platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jax import Array

from pallas_kernels.targets import hopper_refusal

from .shape import MatmulShape


class Implementation(NamedTuple):
    """One way of running the op."""

    load: Callable[[str | None], Callable[..., Array]]
    """Import the function for an architecture; it has the signature of `GroupedMatmul.__call__`, with `out_dtype`
    and `interpret`, and gets arrays that fit each other."""
    platform: str | None
    """The platform where it runs, or None for all. A CPU interprets what belongs elsewhere, slowly."""
    row_alignment: Callable[[], int]
    """See `GroupedMatmul.row_alignment`."""
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


def _cpu_row_alignment() -> int:
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


def _tpu_row_alignment() -> int:
    from .tpu.sizes import ROW_SLAB

    return ROW_SLAB


def _refuse_on_tpu(shape: MatmulShape) -> str | None:
    from .tpu.sizes import refusal

    return refusal(shape)


def _load_gpu(_: str | None) -> Callable[..., Array]:
    from .gpu import gpu_grouped_matmul

    return gpu_grouped_matmul


def _gpu_row_alignment() -> int:
    from .gpu.sizes import ROW_SLAB

    return ROW_SLAB


def _refuse_on_gpu(shape: MatmulShape) -> str | None:
    from .gpu.sizes import refusal

    return refusal(shape)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None, lambda: 1),
    "cpu": Implementation(_load_cpu, "cpu", _cpu_row_alignment, _refuse_on_cpu, _prepare_cpu),
    "tpu": Implementation(_load_tpu, "tpu", _tpu_row_alignment, _refuse_on_tpu),
    "gpu": Implementation(_load_gpu, "gpu", _gpu_row_alignment, _refuse_on_gpu, device_refusal=hopper_refusal),
}
